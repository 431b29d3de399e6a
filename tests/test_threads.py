"""Two runs in two threads do not disturb each other."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed import memo
from numpyro_fed.checks import unsaid, warn_user
from numpyro_fed.host import undisturbed
from numpyro_fed.threads import unvalidated


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("children", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta + b), obs=y)


def effects(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def children() -> nf.Silos:
    draws = np.random.default_rng(0)
    return nf.Silos(
        [dict(x=draws.normal(size=(n, 2)).astype("f"), y=draws.integers(0, 2, n, dtype=np.int32)) for n in (4, 6)]
    )


def schools() -> nf.Silos:
    return nf.Silos([dict(y=np.linspace(-1, 2, n).astype("f")) for n in (3, 4)])


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """The results of jobs that begin at the same time, each in a thread of its own; an error is a result."""
    found: list[Any] = [None] * len(jobs)
    ready = threading.Barrier(len(jobs))

    def work(i: int) -> None:
        ready.wait()
        try:
            found[i] = jobs[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_models_are_traced_in_threads() -> None:
    """NumPyro's handlers of one thread must not be met in another: each trace takes thousands of steps of Python."""
    jobs = [lambda: str(nf.partition(logistic, children())), lambda: str(nf.partition(effects, schools()))]
    expected = [job() for job in jobs]
    for found in (together(*jobs, *jobs) for _ in range(3)):
        assert found == expected * 2


def validates() -> bool:
    """Whether a distribution made now has its arguments looked at."""
    try:
        dist.Normal(0, -1)
    except ValueError:
        return True
    return False


def test_validation_is_off_in_one_thread_alone() -> None:
    """Who leaves first turns nothing on for the other; in the end the flag is what it was."""
    entered, left = threading.Barrier(3, timeout=10), threading.Barrier(3, timeout=10)

    def first() -> bool:
        with unvalidated():
            entered.wait()
        left.wait()
        return validates()

    def second() -> bool:
        with unvalidated():
            entered.wait()
            left.wait()
            return validates()

    def third() -> bool:
        entered.wait()
        meanwhile = validates()
        left.wait()
        return meanwhile

    assert together(first, second, third) == [True, False, True]
    assert validates()


def test_a_users_word_on_validation_holds() -> None:
    """``numpyro.enable_validation`` is the process's, also when it is said between two runs."""
    with numpyro.validation_enabled(False):
        assert not validates() and together(validates) == [False]
        with unvalidated(), unvalidated():
            assert not validates()
        assert not validates()
    assert validates() and together(validates) == [True]
    with unvalidated(), pytest.raises(ValueError, match="on or off"):
        dist.Distribution.set_default_validate_args("no")
    with unvalidated():
        assert dist.Normal(0.0, 1.0, validate_args=True)._validate_args  # a distribution's own goes before
    assert validates()


def test_a_flag_that_was_set_by_hand() -> None:
    """Whoever writes NumPyro's attribute itself finds that both ways to turn validation off still do."""
    flag = dist.Distribution.__dict__["_validate_args"]
    try:
        dist.Distribution._validate_args = True
        with unvalidated():
            assert not validates()
        assert validates()
        numpyro.enable_validation(False)
        assert not validates()
    finally:
        numpyro.enable_validation(True)
        dist.Distribution._validate_args = flag
    assert validates()


def test_warnings_are_unsaid_in_one_thread_alone() -> None:
    """A calibration does not tell what its fits say; a fit in another thread does."""
    entered, said = threading.Barrier(2, timeout=10), threading.Barrier(2, timeout=10)

    def calibrates() -> None:
        with unsaid(UserWarning):
            entered.wait()
            warn_user("moving", nf.VerdictWarning)
            said.wait()

    def fits() -> None:
        entered.wait()
        try:
            warn_user("not to be trusted")
        finally:
            said.wait()

    quiet, loud = together(calibrates, fits)
    assert quiet is None and isinstance(loud, UserWarning)  # warnings are errors in tests
    with unsaid(nf.VerdictWarning), pytest.warns(UserWarning, match="wide"):
        warn_user("wide")


def ep() -> Any:
    fit = nf.EP(logistic).run(jax.random.key(0), children(), num_rounds=2, progress_bar=False)
    return fit.sample(jax.random.key(1), 5), fit.history["bytes_up"]


def sfvi() -> Any:
    fit = nf.SFVI(effects).run(jax.random.key(0), schools(), num_rounds=20, progress_bar=False)
    return fit.sample(jax.random.key(1), 5), fit.history["loss"]


def forget() -> None:
    memo.forget()
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.merge
def test_runs_in_threads_are_those_of_one_thread() -> None:
    """Bit for bit, from nothing compiled: two methods, two models, and a third run that wants the first's programs."""
    forget()
    found = together(ep, sfvi, ep)
    forget()
    first, second = ep(), sfvi()
    for got, expected in zip(found, (first, second, first), strict=True):
        assert not isinstance(got, BaseException), got
        jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_the_search_for_cycles_waits_for_the_last_trace() -> None:
    """Two threads trace, one longer than the other; who has turned the search off for good finds it so."""
    inside, go_on = threading.Event(), threading.Event()

    def longer() -> None:
        with undisturbed():
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=longer)
    assert gc.isenabled()
    with undisturbed():
        thread.start()
        assert inside.wait(10) and not gc.isenabled()
    assert not gc.isenabled()
    go_on.set()
    thread.join()
    assert gc.isenabled()
    gc.disable()
    try:
        with undisturbed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(KeyboardInterrupt), undisturbed():
        raise KeyboardInterrupt
    assert gc.isenabled()
