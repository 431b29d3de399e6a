"""A program in parts computes what it computes in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import binary, glmm, normal

import numpyro_fed as nf
from numpyro_fed import memo, precision
from numpyro_fed.engines import parts
from numpyro_fed.equations import works

heavy = works(lambda x: jnp.sum(jnp.cos(x)))


def plain(n, x):
    return 2 * heavy(x + n)


def attempts(n, x):
    """A loop in a loop, as rounds of attempts are."""

    def attempt(carry):
        total, tries = carry
        return total + heavy(x * total), tries + 1

    def step(i, total):
        least = 1 + i % 3
        total, tries = jax.lax.while_loop(lambda carry: carry[1] < least, attempt, (total, 0))
        return total / tries

    return jax.lax.fori_loop(0, n, step, x[0])


def members(n, x):
    """Members of a vectorised loop end at different times; one of them before the first step."""

    def one(limit, x):
        def step(carry):
            return carry[0] + heavy(carry[0] * x), carry[1] + 1

        return jax.lax.while_loop(lambda carry: carry[1] < limit, step, (jnp.sum(x), 0))

    return jax.vmap(one)(jnp.array([0, 3, 1]) * jnp.minimum(n, 1), jnp.stack([x, x + 1, x - 1]))


def keyed(n, x):
    """Keys and pytrees go through; what is not used is not computed."""
    key = jax.random.key(n)
    return {"x": jax.random.normal(key, x.shape) * heavy(x), "key": jax.random.fold_in(key, 1), "nothing": ()}


def numbers(tree):
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("function", [plain, attempts, members, keyed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("x64", [False, True])
def test_what_is_computed_is_the_same(function, n, x64):
    with jax.enable_x64(x64):
        x = jnp.linspace(0.5, 1.5, 3)
        whole = jax.jit(function)
        cut = parts.parts_of(whole.trace(n, x), whole, precision.for_rounds("least"), precision.for_rounds("some"))
        found, exact = cut(n, x), whole(n, x)
        assert jax.tree.structure(found) == jax.tree.structure(exact)
        for a, b in zip(numbers(found), numbers(exact), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-12 if x64 else 1e-5)


@pytest.mark.parametrize(
    "function", [lambda x: jnp.sum(x), lambda x: heavy(x) + heavy(x + 1), lambda x: jax.lax.map(heavy, x[:, None])]
)
def test_where_no_call_or_several_are_marked_it_stays_whole(function):
    whole = jax.jit(function)
    assert parts.parts_of(whole.trace(jnp.ones(3)), whole, {}, {}) is None


@pytest.fixture
def watched(monkeypatch):
    """Which programs were cut, and how often each part was run."""
    seen = {"cut": 0, "whole": 0, "runs": 0}
    make, call = parts.parts_of, parts.Parts.__call__

    def counted(*args):
        found = make(*args)
        seen["cut" if found else "whole"] += 1
        return found

    def run(self, *args):
        seen["runs"] += 1
        return call(self, *args)

    monkeypatch.setattr("numpyro_fed.engines.vmap.parts_of", counted)
    monkeypatch.setattr(parts.Parts, "__call__", run)
    return seen


def test_runs_in_parts_are_runs_in_one_piece(watched, monkeypatch):
    """EP with all of its looks; every loop that they are in was seen to end where it does in one program."""
    silos = nf.Silos({f"s{j}": dict(x=normal(j, n, 2), y=binary(j, n)) for j, n in enumerate((40, 25, 30))})
    monkeypatch.setattr("numpyro_fed.run.runner.LITTLE", 0)  # everything is much work
    run = lambda: nf.EP(glmm).run(jax.random.key(0), silos, num_rounds=2, progress_bar=False, check=True)
    in_parts = run()
    assert watched["cut"] >= 4 and watched["runs"] > in_parts.num_rounds  # rounds, check, locals, searches
    memo.forget()
    monkeypatch.setattr("numpyro_fed.engines.vmap.parts_of", lambda *args: None)
    whole = run()
    assert in_parts.num_rounds == whole.num_rounds and in_parts.verdict.status == whole.verdict.status
    np.testing.assert_allclose(in_parts.normal().mean, whole.normal().mean, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(in_parts.normal().covariance, whole.normal().covariance, rtol=1e-2, atol=1e-5)
