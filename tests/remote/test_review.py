"""Runs whose silos are elsewhere, looked at by somebody who does not believe them."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.algorithm import Broadcast
from numpyro_fed.engines import wire
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.remote.engine import RemoteError
from numpyro_fed.remote.envelope import Envelope, pack, software, unpack
from numpyro_fed.remote.own import own_fit
from numpyro_fed.remote.policy import Policy
from numpyro_fed.remote.runs import MOST_MADE
from numpyro_fed.remote.silos import connect
from numpyro_fed.remote.states import Kept, States, name_of, structure_of
from numpyro_fed.remote.worker import MOST_RUNS
from numpyro_fed.run.searches import SearchBroadcast

sys.path.append(str(Path(__file__).parent.parent / "laws"))
from elsewhere import Sites, elsewhere, study_of
from test_runs import EP, KEY, SFVI, line, run, three

pytestmark = pytest.mark.filterwarnings("ignore:.*the verdict is")


def asked(silos: Any, type: str, name: str = "york") -> list[Any]:
    """All requests of a type to a silo."""
    found = [unpack(request) for silo, request, _ in silos.engine.post.transport.requests if silo == name]
    return [one for one in found if one.type == type]


# --- what is lost on the way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [pytest.param(EP, marks=pytest.mark.slow), SFVI], ids=["EP", "SFVI"])
def test_any_one_request_may_be_lost(method: Any, tmp_path: Path) -> None:
    """Also the first of a phase, which alone tells the structure of what is sent: nobody is lost for it."""
    whole = elsewhere(method, three(), tmp_path / "whole")
    run(method, whole, 3, check=False)
    works = [i for i, (name, request, _) in enumerate(whole.engine.post.transport.requests) if name == "york"]
    first = next(
        at + 1
        for at, i in enumerate(works)
        if (body := unpack(whole.engine.post.transport.requests[i][1]).body).get("do") == "step" and "from" in body
        if body["from"]
    )
    silos = elsewhere(method, three(), tmp_path / "again", quorum=2)
    silos.engine.post.transport.away["york"] = lambda number: number == first
    fit = run(method, silos, 3, check=False)
    assert fit.left == () and fit.history["took_part"][-1].all()


def test_a_silo_that_is_lost_before_the_rounds_is_named(tmp_path: Path) -> None:
    """In an error that a program can catch."""
    silos = elsewhere(SFVI, three(), tmp_path, patience=1)
    silos.engine.post.transport.away["york"] = lambda number: number == 3  # the survey
    with pytest.raises(nf.SiloLostError, match=r"'york' is lost: .* quorum=3.* without it: run\(key, silos.only"):
        run(SFVI, silos, 2, check=False)
    policy = Policy(phases=("start", "rounds"), least_rows=1)
    with pytest.raises(nf.SiloLostError, match="refuses: its policy allows no survey"):
        run(SFVI, elsewhere(SFVI, three(), tmp_path / "other", policy=policy), 2, check=False)


def test_a_second_loss_keeps_the_fit_so_far(tmp_path: Path) -> None:
    """One silo is lost for good, and another is away when the run of the others is opened."""
    silos = elsewhere(SFVI, three(), tmp_path, quorum=2, patience=1)
    away = silos.engine.post.transport.away
    away["york"], away["hull"] = (lambda number: number > 8), (lambda number: number == 10)
    with pytest.raises(nf.SiloLostError, match=r"'hull' is lost: .* quorum=2") as told:
        run(SFVI, silos, 12, check=False)
    assert told.value.fit.num_rounds > 0


@pytest.mark.merge
def test_a_silo_that_was_not_brought_the_fit_is_named(tmp_path: Path) -> None:
    silos = elsewhere(SFVI, three(), tmp_path)
    run(SFVI, silos, 1, check=False)
    last = silos.engine.post.transport.asked
    silos = elsewhere(SFVI, three(), tmp_path / "again")
    silos.engine.post.transport.away["york"] = lambda number: number == last
    with pytest.warns(UserWarning, match=r"'york' was not brought the fit \(it did not answer in time\)"):
        run(SFVI, silos, 1, check=False)


@pytest.mark.merge
@pytest.mark.filterwarnings("ignore:.*A closing round was left out")
def test_a_closing_round_that_is_refused_is_in_the_verdict(tmp_path: Path) -> None:
    """Without it FedPA has a point, of which a summary says sd 0."""
    method = nf.FedPA(line, start_rounds=0)
    policy = Policy(phases=("survey", "start", "rounds"), least_rows=1)
    fit = run(method, elsewhere(method, three(), tmp_path, policy=policy), 2, check=False)
    assert any("allows no closing" in reason and "no posterior" in reason for reason in fit.reasons)
    assert fit.verdict.status == "not to be trusted"


def test_data_that_do_not_fit_are_called_so(tmp_path: Path) -> None:
    """Not a silo that is lost."""

    def counts(x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Poisson(jax.numpy.exp(b * x)), obs=y)

    own = {name: dict(x=np.ones(22, "f"), y=np.full(22, y, np.int32)) for name, y in (("leeds", 2), ("york", -3))}
    method = nf.EP(counts)
    with pytest.raises(PartitionError, match=r"'york' finds .* its own log says why, and `numpyro-fed check`"):
        run(method, elsewhere(method, nf.Silos(own), tmp_path))


# --- what is on disk --------------------------------------------------------------------------------------------------


def test_a_damaged_state_is_none(tmp_path: Path) -> None:
    """One bit: it is not used, neither as a state nor as the reply that was sent with it."""
    states = States(tmp_path)
    states.put("ab" * 16, Kept({"loc": jax.numpy.arange(3.0)}, b"reply"))
    path = tmp_path / ("ab" * 16)
    whole = path.read_bytes()
    found = States(tmp_path).get("ab" * 16)
    assert found is not None and found.reply == b"reply"
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert States(tmp_path).get("ab" * 16) is None


def test_states_are_for_their_owner(tmp_path: Path) -> None:
    """Also in a folder that was there before, for everybody to read."""
    (tmp_path / "york").mkdir(mode=0o755)
    Sites(study_of(it=EP), three("york"), tmp_path)
    assert (tmp_path / "york" / "runs").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_run_that_is_used_is_not_let_go(tmp_path: Path) -> None:
    """Further runs from one fit, any number of them, find its states."""
    silos = elsewhere(SFVI, three(), tmp_path)
    fit = run(SFVI, silos, 1, check=False)
    for _ in range(MOST_RUNS + 1):
        assert run(SFVI, silos, 1, init_state=fit.state, check=False).left == ()
    assert len(list((tmp_path / "york" / "runs").iterdir())) == MOST_RUNS


# --- what silos learn of each other -----------------------------------------------------------------------------------


@pytest.mark.merge
def test_no_silo_is_given_the_site_of_another(tmp_path: Path) -> None:
    """A site of a linear model is X'X and X'y. The fit that silos are brought has their posterior and not those."""
    data = three()
    silos = elsewhere(EP, data, tmp_path)
    fit = run(EP, silos, 4, check=True)
    (brought,) = asked(silos, "end", "leeds")
    (tmp_path / "fit.npz").write_bytes(brought.payload)
    there = nf.load(tmp_path / "fit.npz", EP)
    np.testing.assert_allclose(there.normal().mean, fit.normal().mean, rtol=1e-9)
    np.testing.assert_allclose(there.normal().sds, fit.normal().sds, rtol=1e-9)
    assert there.verdict.status == fit.verdict.status
    each = np.asarray(there.state.server.sites.each.precision)
    np.testing.assert_array_equal(each[0], np.asarray(fit.state.server.sites.each.precision)[0])  # its own
    np.testing.assert_array_equal(each[1], each[2])
    x = np.stack([np.ones(30), data.own("york")["x"]], axis=1)
    assert np.abs(each - x.T @ x).max(axis=(1, 2)).min() > 1.0  # of 30 rows; none is york's
    assert all(np.ndim(column) == 1 for column in there.history.values())
    mine = own_fit(silos.engine.post.transport.sites["leeds"].worker)
    assert mine.sample(KEY, 3)


@pytest.mark.merge
def test_silos_are_told_that_one_was_lost(tmp_path: Path) -> None:
    silos = elsewhere(SFVI, three(), tmp_path, quorum=2, patience=1)
    silos.engine.post.transport.away["york"] = lambda number: number > 8
    fit = run(SFVI, silos, 12, check=False)
    assert fit.left == ("york",)
    mine = own_fit(silos.engine.post.transport.sites["leeds"].worker)
    assert any("'york' was lost" in reason for reason in mine.reasons)


# --- a server that is not honest --------------------------------------------------------------------------------------


def ask(site: Any, body: dict[str, Any], payload: bytes = b"", type: str = "work", run: str = "") -> Any:
    told = (type, run or body["run"], 0, "server", site.worker.name, site.study, site.software, "", body, payload)
    return unpack(site.handle(pack(Envelope(*told))))


def test_points_are_counted_as_they_are_asked(tmp_path: Path) -> None:
    """Not as the server calls them: the structure of what it sends, and the state, must be of as many."""
    silos = elsewhere(SFVI, three(), tmp_path)
    run(SFVI, silos, 1, check=False)
    site = silos.engine.post.transport.sites["york"]
    told = asked(silos, "work")[-1].body
    words = {name: told[name] for name in ("run", "key", "impl")}

    def searches(num: int) -> Any:
        return Broadcast(SearchBroadcast(np.zeros((num, 2), "f"), np.zeros(num, bool), {}))

    many, one = searches(500), searches(1)
    body = {**words, "do": "start", "phase": ["modes", 1], "round": 0, "effort": "least", "from": []}
    refused = ask(site, {**body, "like": structure_of(many)}, wire.encode(many))
    assert refused.type == "error" and refused.body["kind"] == "ValueError"
    begin = {**body, "like": structure_of(one)}
    assert ask(site, begin, wire.encode(one)).type == "work"
    step = {**begin, "do": "step", "from": [name_of(begin, wire.encode(one))]}
    assert ask(site, {**step, "like": structure_of(many)}, wire.encode(many)).type == "error"
    assert ask(site, step, wire.encode(one)).type == "work"


def test_phases_that_are_refused_are_not_kept(tmp_path: Path) -> None:
    """A request that the policy refuses is not counted: it must not cost memory either."""
    policy = Policy(phases=("survey", "start", "rounds", "closing"), least_rows=1)
    silos = elsewhere(SFVI, three(), tmp_path, policy=policy)
    run(SFVI, silos, 1, check=False)
    site, told = silos.engine.post.transport.sites["york"], asked(silos, "work")[-1].body
    for num in range(1, MOST_MADE + 10):
        refused = ask(site, {**told, "phase": ["locals", num]})
        assert refused.body["why"] == "its policy allows no check"
    assert len(site.worker.runs[told["run"]]._made) <= MOST_MADE


def test_one_message_is_of_one_run(tmp_path: Path) -> None:
    """Else the audit log would name another than was worked on."""
    silos = elsewhere(SFVI, three(), tmp_path)
    run(SFVI, silos, 1, check=False)
    site, last = silos.engine.post.transport.sites["york"], asked(silos, "work")[-1]
    refused = ask(site, last.body, last.payload, run="f" * 16)
    assert refused.type == "error" and "asks for another" in refused.body["why"]
    (agreed,) = asked(silos, "agree")
    assert ask(site, agreed.body, type="agree").type == "agree"  # once more the same
    other = {**agreed.body, "padded": not agreed.body["padded"]}
    assert "something else was agreed on" in ask(site, other, type="agree").body["why"]
    variants = {**last.body, "phase": [*last.body["phase"], 0, 0]}
    assert ask(site, variants, last.payload).type == "error"


# --- a silo that is not honest ----------------------------------------------------------------------------------------


class Liar(Sites):
    """York answers a hello otherwise."""

    lie: dict[str, Any]

    def ask(self, requests: Any, timeout: float) -> dict[str, Any]:
        found = super().ask(requests, timeout)
        told = unpack(found["york"])
        if told.type == "hello":
            found["york"] = pack(told._replace(body=self.lie))
        return found


def test_shapes_that_are_told_take_no_memory(tmp_path: Path) -> None:
    """At the server, and in the other silos, which are told them: 40 TB of an honest description's form."""
    study = study_of(it=SFVI)
    liar = Liar(study, three(), tmp_path)
    rows = {"shape": [10**13], "dtype": "float32"}
    liar.lie = {**asked_once(liar), "silo": {"dict": {"x": rows, "y": rows}}}
    silos = connect(study, liar)
    with pytest.raises(RemoteError, match=r"'york' cannot take part: .*another description of its data"):
        run(SFVI, silos, 1, check=False)
    for lie in ({}, {**liar.lie, "silo": 3}, {**liar.lie, "silo": {"dict": 3}}, {**liar.lie, "own_counts": [[]]}):
        liar.lie = lie
        with pytest.raises(RemoteError, match="'york' describes its data in another form"):
            connect(study, liar)


def asked_once(sites: Sites) -> dict[str, Any]:
    """York's honest answer to a hello."""
    told = ("hello", "0" * 16, 0, "server", "york", sites.study.digest, software(), "", {}, b"")
    return unpack(sites.sites["york"].handle(pack(Envelope(*told)))).body
