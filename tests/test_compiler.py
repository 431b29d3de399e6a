"""What the compiler is told, and kept from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fed import precision


@pytest.fixture
def asked_anew():
    precision._unknown.cache_clear()
    yield
    precision._unknown.cache_clear()


def test_programs_of_rounds_sum_by_themselves(asked_anew):
    """By default XLA gives a sum of 300 times 8 short rows to a library, which the compiled program names."""
    sums = lambda x: jnp.sum(jnp.sin(x), axis=-1)
    text = lambda options: jax.jit(sums, compiler_options=options).lower(jnp.ones((300, 8, 5))).compile().as_text()
    if "ynn" not in text(None):
        pytest.skip("this XLA has no such library")
    assert "ynn" not in text(precision.for_rounds("most"))


def test_an_option_that_the_compiler_does_not_know_is_left_out(asked_anew, monkeypatch):
    """Alone: the others are still told."""
    level = {"xla_backend_optimization_level": 0}
    monkeypatch.setattr(precision, "NO_LIBRARY", {"xla_cpu_of_another_time": ""})
    monkeypatch.setattr(precision, "LEAST", {"xla_cpu_of_yet_another": 1} | level)
    assert precision.for_rounds("most") == {}
    assert precision.for_rounds("least") == precision.unoptimised() == level
    jax.jit(lambda x: x, compiler_options=precision.unoptimised())(1.0)


def test_unforeseen_numbers_are_the_same_and_left_to_the_program():
    known = np.linspace(-2, 2, 64, dtype=np.float32)

    def foreseen(mask):
        return jnp.exp(known), mask

    def left(mask):
        return jnp.exp(precision.unforeseen(known, {"rows": mask})), mask

    mask = jnp.zeros(3, bool)
    np.testing.assert_array_equal(precision.unforeseen(known, {"rows": mask}), known)
    text = lambda function: jax.jit(function).lower(mask).compile().as_text()
    assert "exponential" not in text(foreseen)
    assert "exponential" in text(left)
