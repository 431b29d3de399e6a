"""The command numpyro-fed, called in this process but for one slow test with processes."""

import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from jax.experimental.compilation_cache import compilation_cache

import numpyro_fed as nf
from numpyro_fed.remote.cli import main
from numpyro_fed.remote.study import Study
from numpyro_fed.remote.tables import read

EXAMPLE = Path(__file__).parents[2] / "examples" / "federation"

STUDY = """
import numpyro
import numpyro.distributions as dist
import numpyro_fed as nf

def model(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)

methods = {"EP": nf.EP(model)}
columns = {"x": ["a", "b"], "y": "y"}
"""


CACHE = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def same_cache():
    """A command keeps programs in its own folder; the next test has its cache back."""
    before = {name: getattr(jax.config, name) for name in CACHE}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


CANARY = 0.123456789


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, rows in (("leeds", 40), ("york", 30)):
        own = tmp_path / name
        own.mkdir()
        x = rng.normal(size=(rows, 2))
        y = x @ [1.0, -0.5] + rng.normal(size=rows)
        y[0] = CANARY
        pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y}).to_csv(own / f"{name}.csv", index=False)
        (own / "study.py").write_text(STUDY)
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "study.py").write_text(STUDY)
    return tmp_path


def said(capsys):
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return found.out, found.err


def test_check_tells_what_would_leave_and_sends_nothing(folder, capsys):
    data = folder / "leeds" / "leeds.csv"
    assert main(["check", str(folder / "leeds" / "study.py"), str(data), "--method", "EP"]) == 0
    out, _ = said(capsys)
    assert "x float32[40, 2], y float32[40]" in out  # what it has, and no value
    assert "change.precision(3,)" in out  # what would leave: of two globals a precision of three numbers
    assert "correct   refused: 'correct' is not among the policy's phases" in out
    assert not set(pd.read_csv(data).to_numpy().round(4).astype(str).ravel()) & set(out.split())


BAD = {
    "no data": ("check study.py", "numpyro-fed check study.py data.csv"),
    "no file": ("check study.py no.csv", "no.csv is not there"),
    "no study": ("check other.py leeds.csv", "study file other.py cannot be read"),
    "no method": ("check study.py leeds.csv --method EPP", "did you mean 'EP'"),
    "no site": ("silo --site site.toml", "site.toml cannot be read"),
    "no server": ("run study.py", "server.toml cannot be read"),
    "no network": ("silo --site lonely.toml", "has no [server]: add its address and key"),
    "no keys of files": ("silo-step --site lonely.toml a b", "has no [files]"),
    "no fit": ("fit --site lonely.toml", "no run has ended here yet"),
    "no saved fit": ("show leeds.csv --study study.py", "is not a file of fit.save"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_error_is_one_line_that_says_what_to_type(folder, capsys, monkeypatch, case):
    command, told = BAD[case]
    monkeypatch.chdir(folder / "leeds")
    Path("lonely.toml").write_text('name = "leeds"\nstudy = "study.py"\ndata = "leeds.csv"\n')
    assert main(command.split()) == 1
    _, err = said(capsys)
    assert told in err and err.startswith("numpyro-fed: ") and err.count("\n") == 1


def test_what_is_not_understood(capsys):
    with pytest.raises(SystemExit) as left:
        main(["rnu"])
    assert left.value.code == 2
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0 and "silo-step" in said(capsys)[0]


def test_keys(tmp_path, capsys):
    assert main(["keygen", "leeds", "--out", str(tmp_path)]) == 0
    key = tmp_path / "leeds.key"
    assert len(bytes.fromhex(key.read_text())) == 32 and key.stat().st_mode & 0o077 == 0
    assert main(["keygen", "leeds", "--out", str(tmp_path)]) == 1  # never overwritten
    assert key.read_text().strip() not in said(capsys)[0]


SITE = """
name = "{name}"
study = "study.py"
data = "{name}.csv"
folder = "state"
[files]
private_key = "{name}.sign"
server = "{public}"
"""


def prepared(folder, capsys):
    """Keys and settings of a run by files."""
    public = {}
    for name in ("server", "leeds", "york"):
        assert main(["keygen", name, "--files", "--out", str(folder / name)]) == 0
        public[name] = (folder / name / f"{name}.sign.pub").read_text().strip()
    for name in ("leeds", "york"):
        (folder / name / "site.toml").write_text(SITE.format(name=name, public=public["server"]))
    silos = "\n".join(f'{name} = "{public[name]}"' for name in ("leeds", "york"))
    (folder / "server" / "server.toml").write_text(f'[files]\nprivate_key = "server.sign"\n[files.silos]\n{silos}\n')
    capsys.readouterr()


def test_by_files_the_first_step(folder, capsys, monkeypatch):
    """A request goes out, and of what comes back only the answer to it is taken."""
    pytest.importorskip("cryptography")
    prepared(folder, capsys)
    monkeypatch.chdir(folder)
    assert main("round server --method EP --no-check --out requests".split()) == 3
    assert "waiting for replies of 'leeds', 'york': carry the 2 files" in said(capsys)[1]
    assert main("round server --method SFVI --out requests".split()) == 1
    assert "this run began with method EP, not SFVI" in said(capsys)[1]
    assert main("silo-step --site leeds/site.toml requests replies".split()) == 0
    reply = next(Path("replies").iterdir())
    whole = reply.read_bytes()
    reply.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert main("round server --absorb replies --out requests".split()) == 1
    assert "is refused: the message was changed after it was signed" in said(capsys)[1]
    reply.write_bytes(whole)
    assert main("round server --absorb replies --out requests".split()) == 3
    assert "waiting for replies of 'york'" in said(capsys)[1]
    york = next(Path("requests").glob("*york*"))
    assert main(["silo-step", "--site", "leeds/site.toml", str(york), "other.reply"]) == 1  # not for leeds
    assert "NotForThisSilo" in said(capsys)[0]
    Path("york.request").write_bytes(b"NFE1" + bytes(100))
    assert main(["silo-step", "--site", "york/site.toml", "york.request", "other.reply"]) == 1
    assert "is not signed" in said(capsys)[1]
    (folder / "server" / "study.py").write_text(STUDY + "\n")
    assert main("round server --out requests".split()) == 1
    assert "has changed since this run began" in said(capsys)[1]


@pytest.mark.slow
@pytest.mark.merge
def test_a_whole_run_by_files(folder, capsys, monkeypatch):
    """Each step as a user would type it; the posterior is that of one process, to float32's rounding."""
    pytest.importorskip("cryptography")
    prepared(folder, capsys)
    monkeypatch.chdir(folder)
    code, trips = main("round server --method EP --no-check --out requests".split()), 0
    while code == 3 and trips < 30:
        for name in ("leeds", "york"):
            assert main(["silo-step", "--site", f"{name}/site.toml", "requests", "replies"]) == 0
        shutil.rmtree("requests")
        code, trips = main("round server --absorb replies --out requests".split()), trips + 1
        shutil.rmtree("replies")
    assert code == 0
    study = Study.load("server/study.py")
    fit = nf.load("server/run/fit.npz", study.method("EP"))
    pooled = nf.Silos({name: read(f"{name}/{name}.csv", study.columns) for name in ("leeds", "york")})
    one = study.method("EP").run(jax.random.key(0), pooled, progress_bar=False)
    apart = np.abs(fit.normal().mean - one.normal().mean) / one.normal().sds
    assert apart.max() < 3e-5  # as of float32, in which messages cross
    np.testing.assert_allclose(fit.normal().sds, one.normal().sds, rtol=3e-5)
    written = [path for path in folder.rglob("*") if path.is_file() and path.parts[-2] not in ("leeds", "york")]
    outside = [path for path in written if "state" not in path.parts]
    assert len(outside) > 20  # requests and replies, kept and carried, checkpoints, the fit, programs
    for path in outside:
        data = path.read_bytes()
        for canary in (b"0.123456", np.float32(CANARY).tobytes(), np.float64(CANARY).tobytes()):
            assert canary not in data, path
    for name in ("leeds", "york"):  # the last trip brings the fit
        assert main(["silo-step", "--site", f"{name}/site.toml", "requests", "replies"]) == 0
    capsys.readouterr()
    assert main("fit --site york/site.toml --samples 50 --out york.npz".split()) == 0
    assert np.load("york.npz")["beta"].shape == (50, 2)
    assert main("show server/run/fit.npz --study server/study.py".split()) == 0
    assert "Bytes of numbers that were sent" in said(capsys)[0]


@pytest.mark.slow
@pytest.mark.merge
def test_the_demo(tmp_path, monkeypatch, capsys):
    """Three silos and a server in processes of their own, one silo killed on the way."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import demo

    means, sds = demo.main(demo.parser().parse_args(["--out", str(tmp_path)]))
    out, _ = said(capsys)
    assert means < 3e-5 and sds < 3e-5  # of float32's rounding, over some forty messages
    assert "york was killed" in out
    for who, opened in (("leeds", "leeds/leeds.csv"), ("york", "york/york.csv"), ("server", "none")):
        assert f"  {who:6} {opened}\n" in out
    sys.modules.pop("demo")
