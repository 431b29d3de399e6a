"""Large batches of matrices in pieces: the same numbers, and no call that jaxlib would cut."""

import subprocess
import sys
import textwrap
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.scipy.linalg import lu_factor, solve_triangular

import numpyro_fed as nf
from numpyro_fed import pieces

OPERATIONS = {
    "cholesky": lambda a, b: jnp.linalg.cholesky(a),
    "solve_lower": lambda a, b: solve_triangular(a, b, lower=True),
    "solve_upper": lambda a, b: solve_triangular(a, b[:, 0], trans=1),
    "solve_right": lambda a, b: jax.lax.linalg.triangular_solve(a, b.T, lower=True),
    "solve_right_transposed": lambda a, b: jax.lax.linalg.triangular_solve(a, b.T, lower=True, transpose_a=True),
    "solve_unit": lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True, unit_diagonal=True),
    "solve": jnp.linalg.solve,
    "eigh": lambda a, b: jnp.linalg.eigh(a),
    "eigvalsh": lambda a, b: jnp.linalg.eigvalsh(a),
    "lu": lambda a, b: lu_factor(a),
    "slogdet": lambda a, b: jnp.linalg.slogdet(a),
    "qr": lambda a, b: jnp.linalg.qr(a),
    "r": lambda a, b: jnp.linalg.qr(a, mode="r"),
    "svd": lambda a, b: jnp.linalg.svd(a),
    "in a loop": lambda a, b: jax.lax.fori_loop(0, 2, lambda i, x: jnp.linalg.solve(a, x), b),
    "in a branch": lambda a, b: jax.lax.cond(a[0, 0] > 2, jnp.linalg.cholesky, jnp.linalg.inv, a),
    "of a gradient": lambda a, b: jax.grad(lambda a: jnp.sum(solve_triangular(a, b, lower=True) ** 2))(a),
}


def matrices(num: int, d: int, dtype: Any = np.float64) -> tuple[Any, Any]:
    """Positive definite ones, and right-hand sides."""
    root = np.random.default_rng(0).normal(size=(num, d, d))
    right = np.random.default_rng(1).normal(size=(num, d, 3))
    return jnp.asarray(root @ root.mT + np.eye(d), dtype), jnp.asarray(right, dtype)


def calls(closed: Any) -> list[int | None]:
    """Of every decomposition in a program: of how many matrices it would have to be; None: it is small enough."""
    found = []
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        if eqn.primitive.name in pieces.OPERATIONS:
            found.append(pieces.uncut(eqn.primitive.name, [var.aval.shape for var in eqn.invars]))
        values = chain.from_iterable(v if isinstance(v, tuple) else (v,) for v in eqn.params.values())
        found += [each for v in values if isinstance(v, Jaxpr | ClosedJaxpr) for each in calls(v)]
    return found


@pytest.mark.skipif(not pieces.cut_by_jaxlib(), reason="this jaxlib cuts nothing")
@pytest.mark.parametrize("d", [3, 5])
@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_are_the_same(name, d, monkeypatch, x64):
    """Number by number, or in pieces of a few, in two axes, and the last piece shorter: as each matrix alone."""
    monkeypatch.setattr(pieces, "UNCUT", 200)
    function, (a, b) = OPERATIONS[name], matrices(35, d)
    alone = [jax.jit(function)(*given) for given in zip(a, b, strict=True)]
    twice = jax.vmap(jax.vmap(function))
    a, b = a.reshape(5, 7, d, d), b.reshape(5, 7, d, 3)
    program = pieces.jit(twice)
    assert any(calls(jax.make_jaxpr(twice)(a, b))), "nothing to cut"
    left = calls(program.trace(a, b).jaxpr)
    assert not any(left) and (left or d <= pieces.FEW)
    together = jax.tree.map(lambda *each: jnp.stack(each), *alone)
    for one, other in zip(jax.tree.leaves(program(a, b)), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(one.reshape(other.shape), other, rtol=1e-11, atol=1e-11)
        assert one.dtype == other.dtype


@pytest.mark.skipif(not pieces.cut_by_jaxlib(), reason="this jaxlib cuts nothing")
@pytest.mark.parametrize("d", [2, 5])
def test_matrices_without_a_root(d, monkeypatch, x64):
    """NaN, as LAPACK's, and the others as they are."""
    monkeypatch.setattr(pieces, "UNCUT", 100)
    a, _ = matrices(20, d)
    a = a.at[3, 1, 1].set(-1.0).at[7].set(0.0).at[9, 0, 0].set(jnp.nan)
    alone = jnp.stack([jnp.linalg.cholesky(each) for each in a])
    np.testing.assert_allclose(pieces.jit(jnp.linalg.cholesky)(a), alone, rtol=1e-12, atol=1e-12)
    assert np.isnan(np.diagonal(alone, 0, 1, 2)).all(axis=1).nonzero()[0].tolist() == [3, 7, 9]


@pytest.mark.skipif(not pieces.cut_by_jaxlib(), reason="this jaxlib cuts nothing")
def test_shape_and_statics_stay(monkeypatch):
    monkeypatch.setattr(pieces, "UNCUT", 100)
    a, _ = matrices(20, 3, np.float32)
    run = lambda how, given, key: {"root": jnp.linalg.cholesky(given["a"]), "how": how * given["a"], "key": key}
    found = pieces.jit(run, static_argnums=0)(2, {"a": a}, jax.random.key(0))
    assert found["root"].dtype == np.float32 and found["key"] == jax.random.key(0)
    np.testing.assert_allclose(found["root"] @ found["root"].mT, a, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["how"], 2 * a)
    with pytest.raises(ValueError, match="counted from the first"):
        pieces.jit(run, static_argnums=-1)


@pytest.mark.skipif(not pieces.cut_by_jaxlib(), reason="this jaxlib cuts nothing")
@pytest.mark.parametrize("d", [3, 6])
def test_float64_in_a_program_of_float32(d, monkeypatch):
    """Natural parameters beside a model: each in its own precision, also where a function is called twice."""
    monkeypatch.setattr(pieces, "UNCUT", 100)
    with jax.enable_x64(True):
        single, double = matrices(20, d, np.float32)[0], matrices(20, d)[0]
    root = jax.jit(jnp.linalg.cholesky)

    def both(a, b):
        with jax.enable_x64(True):
            return root(a), root(b), root(b + 1), jax.lax.cond(b[0, 0, 0] > 0, root, jnp.linalg.inv, b)

    with jax.enable_x64(True):
        found = pieces.jit(both)(single, double)
        assert [each.dtype for each in found] == [np.float32, np.float64, np.float64, np.float64]
        np.testing.assert_allclose(found[0], np.linalg.cholesky(single), rtol=1e-4, atol=1e-4)
        for one, other in zip(found[1:], (double, double + 1, double), strict=True):
            np.testing.assert_allclose(one, np.linalg.cholesky(other), rtol=1e-11, atol=1e-11)


@pytest.mark.skipif(not pieces.cut_by_jaxlib(), reason="this jaxlib cuts nothing")
@pytest.mark.parametrize("d", [3, 6])
def test_what_is_called_often_is_lowered_once(d, monkeypatch):
    """Twenty roots of matrices of one size: as many functions and loops as for one."""
    monkeypatch.setattr(pieces, "UNCUT", 100)
    a, _ = matrices(20, d, np.float32)
    often = lambda num: lambda a: sum(jnp.linalg.cholesky(a + i) for i in range(num))
    text = lambda num: pieces.jit(often(num)).lower(a).as_text()
    for word in ("func.func", "stablehlo.while", "stablehlo.sqrt"):
        assert text(20).count(word) == text(1).count(word)


@pytest.mark.skipif(not pieces.cut_by_jaxlib(), reason="this jaxlib cuts nothing")
def test_matrices_of_no_rows(monkeypatch):
    monkeypatch.setattr(pieces, "UNCUT", 2)
    assert pieces.jit(jnp.linalg.cholesky)(jnp.zeros((5, 0, 0))).shape == (5, 0, 0)


def test_without_jit_there_are_values():
    """``jax.disable_jit()`` is how a breakpoint in a model is met: by numbers, once."""
    met = []

    def function(x):
        met.append(x)
        return x * 2 if x[0] > 0 else x

    with jax.disable_jit():
        np.testing.assert_array_equal(pieces.jit(function)(np.ones(2, np.float32)), [2, 2])
    assert len(met) == 1 and not isinstance(met[0], jax.core.Tracer)


def test_nothing_is_done_where_nothing_is_cut(monkeypatch):
    """Small batches, single matrices however large, other versions."""
    a, _ = matrices(20, 3, np.float32)
    closed = jax.make_jaxpr(jnp.linalg.cholesky)(a)
    assert pieces.rewritten(closed) is closed
    monkeypatch.setattr(pieces, "UNCUT", 100)
    alone = jax.make_jaxpr(jnp.linalg.cholesky)(a[0])
    assert pieces.rewritten(alone) is alone and pieces.rewritten(closed) is not closed
    monkeypatch.setattr(pieces, "cut_by_jaxlib", lambda: False)
    assert "scan" not in str(pieces.jit(jnp.linalg.cholesky).trace(a).jaxpr)


def correlated(num: int) -> Any:
    """Rows with two outcomes and two latents of their own, whose covariances are unknown; another for each call."""

    def model(x, y):
        level = numpyro.sample("level", dist.Normal(0, 2).expand([2]).to_event(1))
        spread = numpyro.sample("spread", dist.Normal(-0.5, 0.3))
        root = jnp.exp(spread) * jnp.array([[1.0, 0.0], [0.5, 0.8]])
        with numpyro.plate("rows", x.shape[0]):
            own = numpyro.sample("own", dist.MultivariateNormal(level, scale_tril=root))
            noise = (0.5 + 0.1 * jnp.abs(x))[:, None, None] * jnp.array([[1.0, 0.3], [0.3, 1.0]])
            numpyro.sample("y", dist.MultivariateNormal(jnp.tanh(own), noise), obs=y)

    return model


@pytest.mark.skipif(not pieces.cut_by_jaxlib(), reason="this jaxlib cuts nothing")
def test_a_model_of_many_matrices(monkeypatch):
    """EP waited for ever at its check, on two cores. Number by number or in pieces, all is alike."""
    rng = np.random.default_rng(0)
    rows = lambda n: dict(x=rng.normal(size=n).astype("f"), y=rng.normal(size=(n, 2)).astype("f"))
    silos = nf.Silos({"leeds": rows(5), "york": rows(3)})

    def fitted(num: int) -> tuple[Any, Any]:
        fit = nf.EP(correlated(num)).run(jax.random.key(0), silos, num_rounds=2, progress_bar=False)
        return fit, fit.sample_local(jax.random.key(1), 50, silo="york")

    calls_made: list[str] = []
    make = pieces._traced
    monkeypatch.setattr(pieces, "_traced", lambda eqn, f: calls_made.append(eqn.primitive.name) or make(eqn, f))
    plain, own = fitted(0)
    assert "triangular_solve" in calls_made
    monkeypatch.setattr(pieces, "FEW", 1)
    calls_made.clear()
    fit, own_in_pieces = fitted(1)
    assert "triangular_solve" in calls_made
    assert fit.verdict.status == plain.verdict.status
    scale = np.sqrt(np.diagonal(plain.normal().covariance))
    assert np.max(np.abs(fit.normal().mean - plain.normal().mean) / scale) < 1e-3  # float32, summed in another order
    for name, values in own.items():
        np.testing.assert_allclose(own_in_pieces[name], values, rtol=0.01, atol=0.01)


@pytest.mark.skipif(not pieces.cut_by_jaxlib(), reason="this jaxlib cuts nothing")
def test_programs_that_waited_for_ever_end():
    """Eight batches of solutions at once: by ``jax.jit`` of jaxlib 0.10.2 on two cores this does not come to an end."""
    program = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.scipy.linalg import solve_triangular
        from numpyro_fed.pieces import jit

        def solved(a, b):
            return sum(jnp.sum(solve_triangular(jnp.sin(a * i), b * i, lower=True)) for i in range(1, 9))

        a = jnp.asarray(np.tril(np.ones((500, 20, 20), "f")) + 3 * np.eye(20, dtype="f"))
        b = jnp.ones((500, 20, 1))
        program = jit(solved).lower(a, b).compile()
        for _ in range(30):
            program(a, b).block_until_ready()
        print("done")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "done", run.stderr
