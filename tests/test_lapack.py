"""Decompositions vectorised over silos: those of jax.numpy, one after another where there is much to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fed.normal import lapack

pytestmark = pytest.mark.usefixtures("strict_ranks", "x64")


@pytest.mark.parametrize("d", [2, 40])
def test_batches_are_what_they_were(d):
    """On either side of what is done at once: in one batch, in two of them, and with an argument that all share."""
    root = np.random.default_rng(0).normal(size=(2, 5, d, d))
    matrices, right = jnp.asarray(root @ root.mT + np.eye(d)), jnp.ones(d)
    twice = lambda function: jax.vmap(jax.vmap(function))(matrices)
    lower = jnp.linalg.cholesky(matrices)
    np.testing.assert_allclose(twice(lapack.cholesky), lower, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(twice(lapack.eigvalsh), jnp.linalg.eigvalsh(matrices), rtol=1e-10)
    values, vectors = twice(lapack.eigh)
    np.testing.assert_allclose((vectors * values[..., None, :]) @ vectors.mT, matrices, rtol=1e-8, atol=1e-8)
    solved = jax.vmap(lambda a: lapack.solve(a, right))(matrices[0])
    np.testing.assert_allclose(jnp.einsum("jab,jb->ja", matrices[0], solved), np.ones((5, d)), rtol=1e-8)
    half = jax.vmap(lapack.solve_lower, (0, None))(lower[0], right)
    np.testing.assert_allclose(jax.vmap(lapack.solve_lower_transposed)(lower[0], half), solved, rtol=1e-8)


def test_a_large_batch_is_a_loop():
    """In one call of LAPACK it would be cut into tasks for threads that wait for one another."""
    text = lambda num: str(jax.make_jaxpr(jax.vmap(lapack.cholesky))(jnp.zeros((num, 40, 40))))
    assert "scan" in text(10) and "f64[10,40,40] = cholesky" not in text(10)
    assert "scan" not in str(jax.make_jaxpr(jax.vmap(lapack.cholesky))(jnp.zeros((10, 3, 3))))
