"""Messages that go wrong: every kind, every method; what the server does about it, and what the fit says."""

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from laws.table import METHODS, homes, silos_for
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.engines import Fault, Faults, Loopback
from numpyro_fed.engines.hearing import Gone
from numpyro_fed.engines.inbox import Reply, opened
from numpyro_fed.engines.wire import encode
from numpyro_fed.run.lost import SiloLostError

KEY = jax.random.key(0)
ROUNDS, AT, LATER = 8, 2, range(2, 10**9)
DOCS = Path(__file__).parent.parent / "docs" / "faults.md"
KINDS = ("drop", "late", "twice", "stale", "nan", "shape", "dtype", "damage", "stranger", "poison")
TABLE = {
    "EP": nf.EP(homes, tolerance=0),
    "SEP": METHODS["SEP"],
    "PVI": METHODS["PVI"],
    "SFVI": METHODS["SFVI, no locals"],
    "SFVIAvg": nf.SFVIAvg(homes, optim=optax.adam(0.02), start_rounds=0, local_steps=3),
    "FedPA": METHODS["FedPA"],
    "FedAvg": METHODS["FedAvg"],
    "FedNP": METHODS["FedNP"],
    "GIPVI": METHODS["GIPVI"],
}


@cache
def fitted(name: str, *events: Fault, patience: int = 3, **options: Any) -> nf.Fit:
    method = TABLE[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nf.VerdictWarning)
        engine = Loopback(faults=Faults(events, patience))
        return method.run(KEY, silos_for(method.model), ROUNDS, progress_bar=False, engine=engine, **options)


def rounds_of(fit: nf.Fit) -> np.ndarray:
    return np.flatnonzero(~fit.history["start"].astype(bool))


def equal(a: nf.Fit, b: nf.Fit) -> bool:
    pairs = zip(jax.tree.leaves(a.state.server), jax.tree.leaves(b.state.server), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def outcome(name: str, kind: str, rounds: Any) -> str:
    """In a word."""
    plain, fit = fitted(name), fitted(name, Fault("york", kind, rounds))
    assert all(np.all(np.isfinite(draws)) for draws in fit.sample(KEY, 5).values())
    sent = fit.ledger().groupby("direction", observed=True)["bytes"].sum()
    assert (sent["up"], sent["down"]) == (fit.history["bytes_up"].sum(), fit.history["bytes_down"].sum())
    if "york" not in fit.state.names:
        assert not fit.verdict.ok and any("'york' was lost" in reason for reason in fit.verdict.reasons)
        return "leaves"
    took_part = fit.history["took_part"][rounds_of(fit)]
    if equal(fit, plain):
        assert np.all(took_part)
        return "as without"
    assert np.all(took_part[:, [0, 2]])
    return "used" if np.all(took_part) else "goes on"


def table(names: Any, kinds: Any) -> list[list[str]]:
    return [
        [kind, when, *(outcome(name, kind, rounds) for name in names)]
        for kind in kinds
        for when, rounds in (("once", (AT,)), ("for good", LATER))
    ]


def documented() -> list[list[str]]:
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", tiers(["PVI", "FedAvg"], "FedAvg", others=pytest.mark.merge))
@pytest.mark.parametrize("kind", ["twice", "nan", "drop"])
def test_the_table_holds(name: str, kind: str) -> None:
    header, _, *rows = documented()
    found = table([name], [kind])
    assert found == [[*row[:2], row[header.index(name)]] for row in rows if row[0] == kind]


@pytest.mark.slow
def test_the_whole_table() -> None:
    """``NUMPYRO_FED_WRITE=1`` writes it into the documentation."""
    found = [["fault", "when", *TABLE], *table(TABLE, KINDS)]
    if os.environ.get("NUMPYRO_FED_WRITE"):
        lines = ["| " + " | ".join(row) + " |" for row in found]
        lines.insert(1, "|" + " --- |" * len(found[0]))
        before, _, rest = DOCS.read_text().partition("<!-- table -->\n")
        after = rest.partition("<!-- end -->")[2]
        DOCS.write_text(f"{before}<!-- table -->\n" + "\n".join(lines) + f"\n<!-- end -->{after}")
    header, _, *rows = documented()
    assert [header, *rows] == found


def test_who_took_part_and_what_was_refused_is_in_the_history() -> None:
    fit = fitted("PVI", Fault("york", "nan", (AT,)), Fault("hull", "drop", (AT + 1,)))
    rows = rounds_of(fit)
    at, later = (fit.history["refused"][rows[i]].tolist() for i in (AT, AT + 1))
    assert at == ["", "change.precision is not finite", ""] and later == ["", "", "it did not reply"]
    assert fit.history["took_part"][rows[AT]].tolist() == [True, False, True]


@pytest.mark.parametrize(
    "name", [pytest.param("EP", marks=pytest.mark.merge), pytest.param("PVI", marks=pytest.mark.slow)]
)
def test_a_silo_lost_for_good_leaves_with_its_term(name: str) -> None:
    """The fit is that of the others, and says so."""
    silos = silos_for(homes)
    engine = Loopback(faults=Faults([Fault("york", "drop")], patience=2))
    method = type(TABLE[name])(homes)
    with pytest.warns(nf.VerdictWarning, match="'york' was lost at round 2"):
        fit = method.run(KEY, silos, 20, progress_bar=False, engine=engine)
    rest = method.run(KEY, silos.only("leeds", "hull"), 20, progress_bar=False, engine=Loopback())
    assert fit.state.names == ("leeds", "hull") and fit.left == ("york",)
    off = (fit.normal().mean - rest.normal().mean) / rest.normal().sds
    np.testing.assert_allclose(off, 0, atol=0.02)  # both are at rest within a tolerance of .01
    np.testing.assert_allclose(fit.normal().sds / rest.normal().sds, 1, atol=0.02)
    assert set(fit.ledger()["silo"]) == {"leeds", "york", "hull"}
    assert fit.history["took_part"].shape == (fit.num_rounds, 3)


@pytest.mark.merge
def test_the_server_asks_again_where_it_needs_everyone() -> None:
    """A start and a check are those of a run in which nothing was lost."""
    events = [Fault("york", "drop", (0,), times=2, phase="start"), Fault("hull", "damage", times=1, phase="check")]
    fit, plain = fitted("EP", *events, check=True), fitted("EP", check=True)
    assert equal(fit, plain)
    np.testing.assert_array_equal(fit.evidence.log_target, plain.evidence.log_target)
    assert fit.history["bytes_up"].sum() > plain.history["bytes_up"].sum()


@pytest.mark.merge
def test_a_silo_that_does_not_answer_the_check() -> None:
    fit = fitted("EP", Fault("york", "drop", phase="check"), check=True)
    assert fit.verdict.status == "not checked"
    assert fit.verdict.reasons == ("not checked: silo 'york' is lost: it did not reply",)


@pytest.mark.merge
def test_the_only_silo_cannot_be_lost() -> None:
    engine = Loopback(faults=Faults([Fault("york", "nan", LATER)], patience=2))
    with pytest.raises(SiloLostError, match=r"change\.precision is not finite, and it was the only one") as error:
        TABLE["PVI"].run(KEY, silos_for(homes).only("york"), ROUNDS, progress_bar=False, engine=engine)
    assert error.value.fit.state.round == AT + 2


@pytest.mark.merge
def test_a_gradient_is_held_with_the_draw_it_belongs_to() -> None:
    """SFVI: with nothing lost, sums of what is held are the ordinary step, up to rounding."""
    plain = TABLE["SFVI"].run(KEY, silos_for(homes), ROUNDS, progress_bar=False, engine=Loopback())
    held = fitted("SFVI")
    for a, b in zip(jax.tree.leaves(plain.state.server), jax.tree.leaves(held.state.server), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # float32, sums in another order


def test_max_move_holds_back_a_poisoned_site() -> None:
    silos, poison = silos_for(homes), Fault("york", "poison", factor=1e4)
    plain = nf.EP(homes).run(KEY, silos, progress_bar=False).normal()
    moved = {}
    for most in (None, 0.5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", nf.VerdictWarning)
            engine = Loopback(faults=Faults([poison]))
            fit = nf.EP(homes, max_move=most).run(KEY, silos, 6, progress_bar=False, engine=engine)
        moved[most] = np.max(np.abs(fit.normal().mean - plain.mean) / plain.sds)
    assert moved[0.5] < 0.5 * moved[None]
    assert fit.history["held_back"][rounds_of(fit)][-1].tolist() == [False, True, False]
    assert any("silo 'york' would still have moved the posterior" in reason for reason in fit.verdict.reasons)


@pytest.mark.merge
def test_max_move_leaves_a_good_fit_alone() -> None:
    silos = silos_for(homes)
    free, held = (nf.EP(homes, max_move=most).run(KEY, silos, progress_bar=False) for most in (None, 5.0))
    np.testing.assert_allclose(held.normal().mean, free.normal().mean, rtol=1e-12)
    assert not np.any(held.history["held_back"][rounds_of(held)])
    for most in (0, -1.0, "far", float("nan")):
        with pytest.raises(ValueError, match="max_move must be a positive number of sds"):
            nf.EP(homes, max_move=most)
    with pytest.raises(ValueError, match=r"use nf\.EP"):
        nf.SEP(homes, max_move=1.0)


def test_what_arrives_is_looked_at_in_order() -> None:
    message = {"change": np.ones(2), "ok": np.ones((), bool)}
    good = Reply("york", 3, 7, encode(message))
    found, refused = opened([good._replace(silo="leeds"), good._replace(round=2), good], "york", 3, 7, message)
    assert found is not None and [one.why for one in refused] == [
        "'leeds' was not asked",
        "it answers round 2, and this is 3",
    ]
    endless = good._replace(data=encode({**message, "change": np.array([1.0, np.inf])}))
    assert opened([endless], "york", 3, 7, message)[1][0].why == "['change'] is not finite"
    assert opened([endless], "york", 3, 7, message, watched=False)[0] is not None


def test_faults_say_what_they_take() -> None:
    with pytest.raises(ValueError, match="kind must be one of drop, late"):
        Fault("york", "slow")
    with pytest.raises(ValueError, match="phase must be one of rounds, start, check"):
        Fault("york", "drop", phase="survey")
    with pytest.raises(TypeError, match=r"events must be nf\.engines\.Fault values"):
        Faults(["york"])
    assert "york" in str(Gone("york", "it did not reply", None, (), {}, 0))


@pytest.mark.merge
@pytest.mark.parametrize("schedule", [nf.schedules.sampled(3), nf.schedules.fixed([["leeds"], ["york"], ["hull"]])])
def test_a_schedule_goes_on_with_those_who_are_left(schedule: Any) -> None:
    fit = fitted("PVI", Fault("york", "drop"), patience=1, schedule=schedule)
    assert fit.state.names == ("leeds", "hull") and fit.left == ("york",)


def test_a_silo_lost_in_the_start_is_known_to_the_ledger() -> None:
    fit = fitted("EP", Fault("york", "drop", phase="start"))
    assert fit.left == ("york",) and len(fit.ledger("york")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SEP", "FedPA"])
def test_averages_and_shares_forget_a_silo_that_left(name: str) -> None:
    """Its observations are not counted any more."""
    silos = silos_for(homes)
    method = {"SEP": nf.SEP(homes), "FedPA": nf.FedPA(homes)}[name]
    engine = Loopback(faults=Faults([Fault("york", "drop", LATER)], patience=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = method.run(KEY, silos, 30, progress_bar=False, engine=engine)
        rest = method.run(KEY, silos.only("leeds", "hull"), 30, progress_bar=False)
    np.testing.assert_allclose(fit.state.server.total, rest.state.server.total)


def test_a_step_is_held_as_the_point_it_leads_to() -> None:
    """FedAvg with a silo away: the server stays where it is, and does not walk on with its last step."""
    fit = fitted("FedAvg", Fault("york", "drop", range(1, 7)), patience=20)
    plain = fitted("FedAvg")
    at = lambda fit: np.asarray(fit.history["step"])[rounds_of(fit)]
    assert fit.state.names == plain.state.names
    assert np.max(at(fit)[2:7]) <= 1.05 * at(plain)[1]
