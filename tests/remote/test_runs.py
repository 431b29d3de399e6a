"""Runs whose silos are elsewhere: what is lost, what goes on, what a silo's owner forbids."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.remote.engine import RemoteError
from numpyro_fed.remote.envelope import unpack
from numpyro_fed.remote.policy import Policy
from numpyro_fed.remote.silos import DataElsewhere, connect

sys.path.append(str(Path(__file__).parent.parent / "laws"))
from elsewhere import ALL, Sites, elsewhere, study_of

KEY = jax.random.key(0)
pytestmark = pytest.mark.filterwarnings("ignore:.*the verdict is")


def line(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 5).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(beta[0] + beta[1] * x, 1.0), obs=y)


def three(*names: str) -> nf.Silos:
    found = {}
    for seed, (name, size) in enumerate({"leeds": 24, "york": 30, "hull": 21}.items()):
        draws = np.random.default_rng(seed)
        x = draws.normal(size=size)
        found[name] = dict(x=x.astype("f"), y=(1 + 2 * x + draws.normal(size=size)).astype("f"))
    return nf.Silos({name: found[name] for name in names or found})


EP, SFVI, FEDAVG = nf.EP(line, tolerance=0), nf.SFVI(line, start_rounds=0), nf.FedAvg(line, start_rounds=0)


def run(method: Any, silos: Any, num_rounds: int = 4, **options: Any) -> nf.Fit:
    return method.run(KEY, silos, num_rounds, progress_bar=False, **options)


def same(a: nf.Fit, b: nf.Fit) -> None:
    for x, y in zip(jax.tree.leaves(a.state.server), jax.tree.leaves(b.state.server), strict=True):
        np.testing.assert_array_equal(x, y)


# --- a silo that is away ----------------------------------------------------------------------------------------------


def test_a_silo_that_is_away_for_a_round_is_held(tmp_path: Path) -> None:
    """Its site stays as it is; the fit is that of a run in one process in which its message was dropped."""
    silos = elsewhere(EP, three(), tmp_path, quorum=2)
    post = silos.engine.post.transport
    rounds: list[int] = []

    def away(number: int) -> bool:
        return number == rounds[0]

    whole = run(EP, silos)
    first = next(i for i, told in enumerate(_types(post)) if told == ("rounds", 1))
    again = elsewhere(EP, three(), tmp_path / "again", quorum=2)
    post = again.engine.post.transport
    rounds.append(first + 1)
    post.away["york"] = away
    fit = run(EP, again)
    assert fit.history["took_part"].sum() == whole.history["took_part"].sum() - 1
    faults = nf.engines.Faults([nf.engines.Fault("york", "drop", rounds=[1])], patience=3)
    here = run(EP, three(), engine=nf.engines.Loopback(faults=faults))
    np.testing.assert_allclose(fit.normal().mean, here.normal().mean, rtol=1e-4)  # float32, other padding
    np.testing.assert_allclose(fit.normal().sds, here.normal().sds, rtol=1e-4)


def _types(post: Sites) -> list[Any]:
    """The purpose and round of every request to the first silo, in order."""
    found = []
    for name, request, _ in post.requests:
        if name == "leeds":
            asked = unpack(request)
            worker = post.sites["leeds"].worker
            purpose = worker.purpose(asked.body) if asked.type == "work" else None
            found.append(asked.type if purpose is None else (purpose.phase, purpose.round))
    return found


def others_slow(*methods: Any) -> Any:
    """Of the first a quick test, of the others slow ones."""
    names = {id(EP): "EP", id(SFVI): "SFVI", id(FEDAVG): "FedAvg"}
    slow = [() if i == 0 else pytest.mark.slow for i in range(len(methods))]
    cases = [pytest.param(one, id=names[id(one)], marks=marks) for one, marks in zip(methods, slow, strict=True)]
    return pytest.mark.parametrize("method", cases)


@others_slow(EP, SFVI, FEDAVG)
def test_a_silo_that_is_gone_leaves_with_its_term(method: Any, tmp_path: Path) -> None:
    """With a quorum the run ends, names it, and is the run of the others; the verdict is not fine."""
    silos = elsewhere(method, three(), tmp_path, quorum=2, patience=2)
    post = silos.engine.post.transport
    post.away["york"] = lambda number: number > 8
    fit = run(method, silos, 40, check=False)
    assert fit.left == ("york",) and fit.state.names == ("leeds", "hull")
    assert any("'york' was lost" in reason for reason in fit.verdict.reasons) and fit.verdict.status != "trusted"
    if method is EP:
        others = run(EP, three("leeds", "hull"), 40)
        np.testing.assert_allclose(fit.normal().mean, others.normal().mean, atol=2e-3 * others.normal().sds.max())
        np.testing.assert_allclose(fit.normal().sds, others.normal().sds, rtol=2e-3)


@pytest.mark.merge
def test_below_the_quorum_it_stops_with_the_fit_so_far(tmp_path: Path) -> None:
    silos = elsewhere(EP, three(), tmp_path, patience=2)
    silos.engine.post.transport.away["york"] = lambda number: number > 9
    with pytest.raises(nf.SiloLostError, match=r"'york' is lost: .*fewer than quorum=3") as told:
        run(EP, silos, 40, check=False)
    assert told.value.fit is not None and told.value.fit.num_rounds > 0


@pytest.mark.merge
def test_a_silo_that_is_never_there(tmp_path: Path) -> None:
    """Before the first round it is left out where a quorum allows it, and the verdict says so."""
    study = study_of(it=EP)
    for after in (0, 1, 2):  # at the hello, when the run is opened, in the survey
        sites = Sites(study, three(), tmp_path / str(after))
        sites.away["york"] = lambda number, after=after: number > after
        fit = run(EP, connect(study, sites, quorum=2, patience=1), check=False)
        assert fit.state.names == ("leeds", "hull")
        assert any("'york'" in reason for reason in fit.verdict.reasons) and fit.verdict.status != "trusted"
    sites.away["york"] = lambda number: True
    with pytest.raises(RemoteError, match=r"'york' \(it did not answer in time\) did not answer, .* quorum=3"):
        connect(study, sites)


@pytest.mark.merge
def test_a_loss_after_a_loss(tmp_path: Path) -> None:
    """Those who remain are known: one that is away just then is held, as it would be without the loss."""
    silos = elsewhere(SFVI, three(), tmp_path, quorum=1, patience=3)
    post = silos.engine.post.transport
    post.away["leeds"] = lambda number: number > 12

    runs: list[str] = []

    def away(number: int) -> bool:
        """York is away in the first two rounds that go on without leeds."""
        asked = unpack(post.request)
        if asked.run not in runs and asked.body.get("do") == "step" and len(asked.body["from"]):
            runs.append(asked.run)
        return runs[1:2] == [asked.run] and asked.body.get("do") == "step" and asked.body["round"] < first() + 2

    def first() -> int:
        rounds = [unpack(request) for name, request, _ in post.requests if name == "hull"]
        steps = [one for one in rounds if one.run == runs[1] and one.body.get("do") == "step" and one.body["from"]]
        return min((one.body["round"] for one in steps), default=99)

    post.away["york"] = away
    fit = run(SFVI, silos, 30, check=False)
    assert fit.left == ("leeds",) and set(fit.state.names) == {"york", "hull"}
    assert 1 <= np.sum(~fit.history["took_part"][:, 1]) <= 3  # york, in the order of all silos


# --- processes that end -----------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("method", [EP, SFVI], ids=["EP", "SFVI"])
def test_a_server_that_is_killed_goes_on(method: Any, tmp_path: Path) -> None:
    """After any number of requests, and with every reply lost that was on its way: bit for bit."""
    data, count = three(), 6
    study = study_of(it=method)
    whole = run(method, connect(study, Sites(study, data, tmp_path / "whole")), count, check=True)
    total = connect(study, Sites(study, data, tmp_path / "count"))
    run(method, total, count, check=True)
    asked = total.engine.post.transport.asked
    for number in sorted({3, 5, 7, 9, asked // 2, asked - 2}):
        folder = tmp_path / str(number)
        folder.mkdir()
        sites = Sites(study, data, folder)

        def ask(requests: Any, timeout: float, sites: Sites = sites, number: int = number) -> Any:
            found = Sites.ask(sites, requests, timeout)
            if sites.asked == number:
                raise Killed  # the silos have answered, and nobody heard it
            return found

        sites.ask = ask  # type: ignore[method-assign]
        options: dict[str, Any] = dict(checkpoint=folder / "run.nfc", checkpoint_every=1, check=True)
        with pytest.raises(Killed):
            run(method, connect(study, sites), count, **options)
        again = run(method, connect(study, Sites(study, data, folder)), count, **options)
        same(again, whole)
        assert again.verdict.status == whole.verdict.status


def test_changed_data_are_refused(tmp_path: Path) -> None:
    data, study = three(), study_of(it=EP)
    options: dict[str, Any] = dict(checkpoint=tmp_path / "run.nfc", checkpoint_every=1, check=False)
    sites = Sites(study, data, tmp_path)
    sites.away["york"] = lambda number: number > 8
    with pytest.raises(nf.SiloLostError):
        run(EP, connect(study, sites, patience=1), 6, **options)
    other = data.only("leeds", "york", "hull").changed(lambda own: {**own, "y": own["y"] + 1})
    with pytest.raises(RemoteError, match="its data are not those that this run was opened with"):
        run(EP, connect(study, Sites(study, other, tmp_path)), 6, **options)


# --- what a silo's owner decides --------------------------------------------------------------------------------------


@pytest.mark.merge
def test_a_policy_without_checks_is_in_the_verdict(tmp_path: Path) -> None:
    policies = {"leeds": ALL, "york": Policy(phases=("survey", "start", "rounds", "closing")), "hull": ALL}
    fit = run(EP, elsewhere(EP, three(), tmp_path, policy=policies), check=True)
    assert "not checked: silo 'york' refuses: its policy allows no check" in " ".join(str(fit.verdict).split())


@pytest.mark.merge
def test_a_correction_is_refused_by_default(tmp_path: Path) -> None:
    fit = run(EP, elsewhere(EP, three(), tmp_path, policy=Policy()), check=True)
    assert fit.verdict.status == "trusted"
    with pytest.raises(RuntimeError, match="its policy allows no correction"):
        fit.correct(KEY)
    allowed = run(EP, elsewhere(EP, three(), tmp_path / "allowed"), check=True).correct(KEY, 512)
    here = run(EP, three(), check=True).correct(KEY, 512)
    np.testing.assert_allclose(allowed.correction.log_evidence, here.correction.log_evidence, atol=1e-3)


def test_a_policy_about_methods_and_rows(tmp_path: Path) -> None:
    """Rows are those that are observed, once the model has told which these are."""
    policy = Policy(methods=("SFVI",))
    with pytest.raises(RemoteError, match="its policy does not allow this method"):
        run(EP, elsewhere(EP, three(), tmp_path, policy=policy))

    def with_knots(x, knots, y=None):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(beta * x + jax.numpy.mean(knots), 1.0), obs=y)

    sizes = {"leeds": 24, "york": 3}
    silos = nf.Silos(
        {name: {k: np.ones(n, "f") for k in "xy"} | {"knots": np.ones(60, "f")} for name, n in sizes.items()}
    )
    method = nf.SFVI(with_knots, start_rounds=0)
    with pytest.raises(nf.SiloLostError, match="'york' refuses: its policy does not allow this study"):
        run(method, elsewhere(method, silos, tmp_path / "knots", policy=Policy()), 1, check=False)


def test_a_method_that_the_study_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such EP, so silos do not know it: add it"):
        run(nf.EP(line, damping=0.3), elsewhere(EP, three(), tmp_path))


# --- what is made of a fit --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_and_add(tmp_path: Path) -> None:
    silos = elsewhere(EP, three(), tmp_path)
    fit = run(EP, silos, check=False)
    here = run(EP, three(), check=False)
    for rounds in (0, 2):
        a, b = (one.without("york", rounds, rng_key=KEY) for one in (fit, here))
        np.testing.assert_allclose(a.normal().mean, b.normal().mean, rtol=1e-4)
    two = run(EP, silos.only("leeds", "hull"), check=False)
    there = two.add(KEY, silos.only("york"), 2)
    alone = run(EP, three("leeds", "hull"), check=False).add(KEY, three("york"), 2)
    np.testing.assert_allclose(there.normal().mean, alone.normal().mean, rtol=1e-4)
    assert fit.conflict().table.shape == here.conflict().table.shape
    assert nf.load(fit.save(tmp_path / "fit"), EP).sample(KEY, 3)


@pytest.mark.merge
def test_what_stays_in_the_silo(tmp_path: Path) -> None:
    """Globals are drawn here; a silo's own are not, and neither is it fitted by itself from here."""
    fit = run(EP, elsewhere(EP, three(), tmp_path), 1, check=False)
    assert fit.sample(KEY, 3)["beta"].shape == (3, 2)
    with pytest.raises(DataElsewhere, match="are in 'york': draws of them are made there"):
        fit.predict(KEY, silo="york")
    with pytest.raises(ValueError, match="numpyro-fed alone"):
        run(nf.Independent(line), elsewhere(EP, three(), tmp_path / "alone"))


def test_other_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="these silos are elsewhere"):
        run(EP, elsewhere(EP, three(), tmp_path), engine=nf.engines.Vmap())
