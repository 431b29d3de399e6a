"""What a program of the engine depends on: shapes, not how many silos there are nor what they are called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.algorithm import Broadcast, FederatedAlgorithm
from numpyro_fed.data.axis import Axis
from numpyro_fed.data.padding import call_spec
from numpyro_fed.data.stack import Bucket, Stack
from numpyro_fed.engines import vmap
from numpyro_fed.keys import identities, keys_of, normal, silo_keys, silo_words

KEY = jax.random.key(0)


def noisy_mean(num_silos: int) -> FederatedAlgorithm:
    """Every silo sends the mean of its rows, a draw of its own and what it alone was sent."""

    def silo_step(key, broadcast, silo, data):
        return jnp.mean(data.args[0]) + normal(key, ()) + broadcast.each, silo + 1

    return FederatedAlgorithm(
        init=lambda key: jnp.zeros(()),
        init_silo=lambda key, broadcast, data: jnp.zeros((), jnp.int32),
        broadcast=lambda key, server: Broadcast(server, server * jnp.ones(num_silos)),
        silo_step=silo_step,
        aggregate=lambda messages, cohort: messages,
        server_step=lambda key, server, messages: (0.5 * server + jnp.mean(messages), {"loss": messages[0]}),
    )


def stack_of(names: list[str], sizes: tuple[int, ...] = (2, 3)) -> Stack:
    """The first half of the silos have ``sizes[0]`` rows, the others ``sizes[1]``, in a bucket each."""
    half = len(names) // 2
    lengths = {name: sizes[j >= half] for j, name in enumerate(names)}
    silos = nf.Silos({name: dict(x=np.arange(n, dtype=np.float32) + j) for j, (name, n) in enumerate(lengths.items())})
    axes = (Axis("rows", ("x",), (), lengths),)
    buckets = Bucket(tuple(names[:half]), {"rows": sizes[0]}), Bucket(tuple(names[half:]), {"rows": sizes[1]})
    return Stack(tuple(names), buckets, call_spec(silos, axes), axes, silos, None)


def lowered(num_silos: int, cohort: int | None) -> str:
    stack, algorithm = stack_of([f"silo {j}" for j in range(num_silos)]), noisy_mean(num_silos)
    server, states = nf.engines.Vmap().start(algorithm, KEY, stack)
    cohorts = None if cohort is None else np.zeros((vmap.CHUNK, cohort), np.int32)
    places = vmap.places_of(stack.names, tuple(bucket.names for bucket in stack.buckets))
    arguments = places, KEY, stack.arrays, stack.shared, server, states, 0, cohorts, 1
    return vmap._rounds("most").lower(algorithm, *arguments).as_text()


@pytest.mark.parametrize("cohort", [None, 2])
def test_a_program_is_as_long_for_many_silos_as_for_few(cohort: int | None) -> None:
    few, many = lowered(4, cohort), lowered(400, cohort)
    assert few.count("\n") == many.count("\n")
    assert len(many) < 1.05 * len(few), "no name, place or identity is a constant of the program"


def test_other_names_need_no_other_program() -> None:
    algorithm, engine = noisy_mean(4), nf.engines.Vmap()
    found = {}
    for names in (["leeds", "york", "hull", "bath"], ["ripon", "selby", "thirsk", "malton"]):
        stack = stack_of(names)
        server, states = engine.start(algorithm, KEY, stack)
        found[names[0]] = float(engine.rounds(algorithm, KEY, stack, server, states, 0, None, 3)[0])
        sizes = vmap._start()._cache_size(), vmap._rounds("most")._cache_size()
        assert found.setdefault("programs", sizes) == sizes
    assert found["leeds"] != found["ripon"], "names are what random numbers come from"


def test_who_draws_is_known_of_every_bucket() -> None:
    """Law: equals Loopback, also where the silos of one bucket alone draw; their keys are their own in every round."""

    def silo_step(key, broadcast, silo, data):
        return (normal(key, ()) if data.args[0].shape[0] > 2 else jnp.zeros(())), silo

    nobody = FederatedAlgorithm(
        init=lambda key: jnp.zeros(4),
        init_silo=lambda key, broadcast, data: jnp.zeros((), jnp.int32),
        broadcast=lambda key, server: Broadcast(()),
        silo_step=silo_step,
        aggregate=lambda messages, cohort: messages,
        server_step=lambda key, server, messages: (messages, {"sent": messages}),
    )
    stack, found = stack_of(["a", "b", "c", "d"]), []
    for engine in (nf.engines.Vmap(), nf.engines.Loopback()):
        server, states = engine.start(nobody, KEY, stack)
        found.append(engine.rounds(nobody, KEY, stack, server, states, 0, None, 2)[2]["sent"])
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert np.all(found[0][:, :2] == 0) and len(np.unique(found[0][:, 2:])) == 4


def test_who_is_where() -> None:
    """Law: a silo's place among all, and within its bucket, whatever the order of the buckets."""
    places = vmap.places_of(("a", "b", "c", "d", "e"), (("b", "d"), ("a", "c", "e")))
    np.testing.assert_array_equal(places.of_bucket[0], [1, 3])
    np.testing.assert_array_equal(places.within[0], [2, 0, 2, 1, 2])
    np.testing.assert_array_equal(places.within[1], [0, 3, 1, 3, 2])
    np.testing.assert_array_equal(places.bucket, [1, 0, 1, 0, 1])
    np.testing.assert_array_equal(np.concatenate(places.of_bucket)[places.order], np.arange(5))
    assert vmap.places_of(("a", "b"), (("a",), ("b",))).order is None


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(5), jax.random.key(1, impl="rbg")], ids=str)
def test_numbers_are_those_of_jax(key: jax.Array, x64: bool) -> None:
    """Law: one pass over the counters gives the very numbers of jax.random, for every kind of key."""
    words = jnp.asarray(identities(["leeds", "york", "hull"]))
    with jax.enable_x64(x64):
        for shape in ((), (7,), (3, 2, 1)):
            np.testing.assert_array_equal(normal(key, shape), jax.random.normal(key, shape))
        keys = silo_keys(key, words)
        same = keys_of(silo_words(key, words), key)
        assert same.dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(keys))
        draw = lambda draw_one: jax.vmap(lambda one: draw_one(one, (4,)))(keys)
        np.testing.assert_array_equal(draw(normal), draw(jax.random.normal))
