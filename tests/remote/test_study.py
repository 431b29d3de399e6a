"""Study files and the files that tell a machine where things lie."""

import hashlib

import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.remote import config
from numpyro_fed.remote.study import Study, StudyError

MODEL = """
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro_fed as nf

def model(x, knots, y=None, scale=1.0):
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(beta * x + knots[0], scale), obs=y)

shared = dict(knots=np.zeros(3))
"""


def written(folder, text):
    path = folder / "asthma.py"
    path.write_text(text)
    return path


def test_a_study(tmp_path):
    path = written(tmp_path, MODEL + 'methods = {"EP": nf.EP(model, family="diagonal"), "mine": nf.SFVI(model)}')
    study = Study.load(path)
    assert study.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert study.name == "asthma"
    assert study.method("EP").family == "diagonal" and isinstance(study.method("mine"), nf.SFVI)
    assert isinstance(study.method("PVI"), nf.PVI) and study.method("PVI").model is study.model
    assert [column.argument for column in study.columns] == ["x", "y"]  # knots are shared, scale has a value
    np.testing.assert_array_equal(study.shared["knots"], np.zeros(3))
    with pytest.raises(ValueError, match="has no 'SVFI': did you mean 'SFVI'"):
        study.method("SVFI")


def test_where_sites_live_holds_for_methods_that_are_not_listed(tmp_path):
    study = Study.load(written(tmp_path, MODEL + 'methods = {"EP": nf.EP(model, shared="beta")}'))
    assert study.method("SFVI").shared == ("beta",)


def test_columns(tmp_path):
    text = MODEL.replace("scale=1.0", "child=None, n=None")
    columns = 'columns = {"x": "age", "y": "fev", "child": {"groups": "id", "count": "n"}}'
    study = Study.load(written(tmp_path, text + columns))
    assert study.own_counts == {"n"} and study.renumbered == {"child"}


def test_two_studies_of_one_name_are_two(tmp_path):
    a = Study.load(written(tmp_path, MODEL))
    b = Study.load(written(tmp_path, MODEL + "name = 'b'"))
    assert a.digest != b.digest and a.model is not b.model


BAD = {
    "no model": ("shared = {}", "has no model: define def model"),
    "no function": ("model = 3", "must be a NumPyro model"),
    "no Python": ("def model(:\n  pass", "line 1: invalid syntax"),
    "fails": (MODEL + "\n1 / 0", "line 14: ZeroDivisionError"),
    "leaves": (MODEL + "\nimport sys; sys.exit()", "line 14: SystemExit"),
    "needs more files": ("import helpers_of_mine", "line 1: ModuleNotFoundError.*A study is one file"),
    "shared is a list": (MODEL + "shared = [1]", "shared must be a dict"),
    "shared is nobody's": (MODEL + "shared['nots'] = 1", "the model has no 'nots': did you mean 'knots'"),
    "shared text": (MODEL + "shared['knots'] = 'a'", "shared argument 'knots' is a str"),
    "a class": (MODEL + 'methods = {"EP": nf.EP}', r"methods\['EP'\] is a class: write nf.EP\(model\)"),
    "no method": (MODEL + 'methods = {"EP": "EP"}', "must be a method such as"),
    "no dict": (MODEL + "methods = [nf.EP(model)]", "methods must be a dict"),
    "another model": (MODEL + 'methods = {"EP": nf.EP(lambda x: None)}', r"of another model.*nf.EP\(model, ...\)"),
    "columns of nobody": (MODEL + 'columns = {"x": "a", "Y": "b"}', "the model has no 'Y'"),
    "columns and shared": (MODEL + 'columns = {"x": "a", "knots": "b"}', "'knots' stands in columns and in shared"),
    "an argument from nowhere": (MODEL + 'columns = {"y": "b"}', "argument 'x' is neither in columns nor in shared"),
    "data": (MODEL + "data = np.zeros((600, 2))", "'data' holds 1200 numbers. A study holds no data"),
    "data in lists": (MODEL + "data = {'a': [[1.0] * 600] * 2}", "'data' holds 1200 numbers"),
    "a table": (MODEL + "import pandas\nd = pandas.DataFrame({'a': [1]})", "'d' is a DataFrame: a study holds no data"),
    "silos": (MODEL + "d = nf.Silos([dict(x=np.ones(3, 'f'))])", "'d' is a Silos"),
    "name": (MODEL + "name = 3", "name must be a string"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_studies(tmp_path, case):
    text, told = BAD[case]
    with pytest.raises(StudyError, match=told):
        Study.load(written(tmp_path, text))


def test_no_file(tmp_path):
    with pytest.raises(StudyError, match="cannot be read"):
        Study.load(tmp_path / "study.py")


SITE = """
name = "leeds"
study = "study.py"
data = "leeds.csv"
[columns]
x = "Alter"
[policy]
least_rows = 5
[server]
address = "127.0.0.1:9000"
key = "leeds.key"
"""


@pytest.fixture
def folder(tmp_path):
    for name in ("study.py", "leeds.csv", "leeds.public", "server.private"):
        (tmp_path / name).write_text("")
    (tmp_path / "leeds.public").write_text("ed25519:abc\n")
    (tmp_path / "leeds.key").write_text("00" * 32)
    (tmp_path / "leeds.key").chmod(0o600)
    return tmp_path


def test_site(folder):
    (folder / "site.toml").write_text(SITE)
    found = config.read_site(folder / "site.toml")
    assert (found.name, found.folder) == ("leeds", folder / "leeds-state")
    assert found.server is not None and found.server.address == ("127.0.0.1", 9000) and found.server.tls(False) is None
    assert found.columns == {"x": "Alter"} and found.policy == {"least_rows": 5}
    assert found.key is not None and config.secret(found.key) == bytes(32)


BAD_SITES = {
    "unknown": (SITE.replace("study =", "studdy ="), "site.toml has no 'studdy': did you mean 'study'"),
    "unknown in a part": (SITE.replace("key =", "kay ="), r"site.toml, \[server\] has no 'kay': did you mean 'key'"),
    "no name": (SITE.replace('name = "leeds"', ""), "name must be a text, it is missing"),
    "a bad name": (SITE.replace('"leeds"', '"../leeds"'), "must be letters"),
    "server": (SITE.replace('"leeds"', '"server"'), "not 'server'"),
    "no file": (SITE.replace("leeds.csv", "york.csv"), "data names the file .*york.csv, which is not there"),
    "a part as a line": ("policy = 3\n" + SITE.replace("[policy]\nleast_rows = 5", ""), r"write \[policy\]"),
    "port": (SITE.replace(":9000", ":door"), "must be a host and a port"),
    "no toml": (SITE + "[[", "is no TOML file"),
}


@pytest.mark.parametrize("case", BAD_SITES)
def test_bad_sites(folder, case):
    text, told = BAD_SITES[case]
    (folder / "site.toml").write_text(text)
    with pytest.raises(config.ConfigError, match=told):
        config.read_site(folder / "site.toml")


def test_server(folder):
    text = '[silos]\nleeds = "leeds.key"\n[listen]\naddress = "0.0.0.0"\n'
    (folder / "server.toml").write_text(text)
    found = config.read_server(folder / "server.toml")
    assert found.names == ("leeds",) and found.listen is not None and found.listen.address == ("0.0.0.0", config.PORT)
    files = '[files]\nprivate_key = "server.private"\n[files.silos]\nleeds = "leeds.public"\n'
    (folder / "server.toml").write_text(files)
    assert config.read_server(folder / "server.toml").public_keys == {"leeds": "ed25519:abc"}
    (folder / "server.toml").write_text(files.replace("leeds.public", "ed25519:xyz"))
    assert config.read_server(folder / "server.toml").public_keys == {"leeds": "ed25519:xyz"}
    (folder / "server.toml").write_text("")
    with pytest.raises(config.ConfigError, match="names no silo"):
        config.read_server(folder / "server.toml")


def test_secrets_are_secret(folder):
    path = folder / "leeds.key"
    path.chmod(0o644)
    with pytest.raises(config.ConfigError, match="chmod 600"):
        config.secret(path)
    path.chmod(0o600)
    path.write_text("abc")
    with pytest.raises(config.ConfigError, match="is no key file"):
        config.secret(path)
