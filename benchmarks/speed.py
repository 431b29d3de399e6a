"""How fast is SFVI, against NumPyro's own pooled variational inference?

Everything is measured in one process, warm, as the fastest of several interleaved repeats, and printed as ratios: on a
busy machine times are noise, ratios less so. The model is the six-cities mixed model, one draw per round. The pooled
competitors are NumPyro's ``SVI`` with the same structured family written as an ordinary guide, and with ``AutoNormal``.

Run it with ``make bench``, or ``python -m benchmarks.speed --quick``.
"""

import argparse
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_fed as nf
from examples.six_cities import model
from numpyro_fed import memo
from numpyro_fed.algorithm import Cohort, Left, Plan
from numpyro_fed.data.padding import silo_data
from numpyro_fed.engines.base import sent_to
from numpyro_fed.engines.vmap import CHUNK
from numpyro_fed.precision import QUICK, in_user_precision, known, stacked

DATA = nf.datasets.six_cities()


def structured_guide(smoke, age, wheeze=None):
    """The family of nf.guides.StructuredNormal(), as a NumPyro user would write it for the pooled model."""
    n, d = smoke.shape[0], 5
    loc = numpyro.param("loc", jnp.zeros(d))
    log_scale = numpyro.param("log_scale", jnp.full(d, -1.0))
    tril = numpyro.param("tril", jnp.zeros((d, d)))
    scale_tril = jnp.exp(log_scale)[:, None] * (jnp.tril(tril, -1) + jnp.eye(d))
    z = numpyro.sample("z", dist.MultivariateNormal(loc, scale_tril=scale_tril), infer={"is_auxiliary": True})
    numpyro.sample("beta", dist.Delta(z[:4]).to_event(1))
    numpyro.sample("omega", dist.Delta(z[4]))
    b_loc = numpyro.param("b_loc", jnp.zeros(n))
    b_log_scale = numpyro.param("b_log_scale", jnp.zeros(n))
    coupling = numpyro.param("coupling", jnp.zeros((n, d)))
    with numpyro.plate("children", n):
        numpyro.sample("b", dist.Normal(b_loc + coupling @ (z - loc), jnp.exp(b_log_scale)))


def rows(times):
    """The children, repeated: more rows of the same kind."""
    return dict(smoke=np.tile(DATA.smoke, times), wheeze=np.tile(DATA.wheeze, (times, 1)))


def pooled(guide, times=1):
    """NumPyro's SVI, CHUNK steps in one compiled loop. Returns (run, seconds to compile)."""
    data = {name: jnp.asarray(value) for name, value in (rows(times) | dict(age=DATA.age)).items()}
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    state = svi.init(jax.random.PRNGKey(0), **data)

    @jax.jit
    def steps(state, data, count):
        def body(i, carry):
            state, losses = carry
            state, loss = svi.update(state, **data)
            return state, losses.at[i].set(loss)

        return jax.lax.fori_loop(0, count, body, (state, jnp.zeros(CHUNK)))

    seconds = timed(lambda: steps(state, data, 1))
    return lambda: jax.block_until_ready(steps(state, data, CHUNK)), seconds


def federated(num_silos, times=1, labels=None):
    """SFVI with the same family, CHUNK rounds in one compiled loop. Returns (run, seconds to compile)."""
    data = rows(times)
    labels = np.arange(len(data["smoke"])) % num_silos if labels is None else labels
    silos = nf.split(labels, shared=dict(age=DATA.age), **data)
    method = nf.SFVI(model, guide=nf.guides.StructuredNormal(), optim=optax.adam(1e-2), importance_samples=1)
    _, stack, phase = prepared(method, silos)
    engine, key = nf.engines.Vmap(), jax.random.key(0)
    server, states = engine.start(phase.algorithm, key, stack)
    run = lambda count: engine.rounds(phase.algorithm, key, stack, server, states, 0, None, count)
    seconds = timed(lambda: run(1))
    return lambda: run(CHUNK), seconds


def prepared(method, silos):
    """The split model, the silos' data, and the phase of the method's own rounds."""
    split, survey, stack, _ = method.prepare(silos)
    phases = method.compile(split, survey, Plan(names=silos.names)).phases
    return split, stack, next(phase for phase in phases if phase.role == "rounds")


def timed(function):
    began = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - began


def fastest(runs, repeats, steps=CHUNK):
    """Milliseconds per step of runs of so many: the fastest repeat of each, interleaved: all meet the same machine."""
    times = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(timed(run))
    return {name: min(values) / steps * 1e3 for name, values in times.items()}


def growth(quick, repeats):
    """(b) Time per step against NumPyro's as rows grow, two silos."""
    made, sizes = {}, (1, 4) if quick else (1, 4, 16, 64)
    for times in sizes:
        made[f"SVI {times}"] = pooled(structured_guide, times)
        made[f"SFVI {times}"] = federated(2, times)
    steps = fastest({name: run for name, (run, _) in made.items()}, repeats)
    print("\n(b) growth with rows at 2 silos")
    print(f"{'rows':>8} {'SVI ms':>10} {'SFVI ms':>10} {'SFVI/SVI':>10}")
    for times in sizes:
        ours, theirs = steps[f"SFVI {times}"], steps[f"SVI {times}"]
        print(f"{537 * times:8d} {theirs:10.4f} {ours:10.4f} {ours / theirs:10.2f}", flush=True)


def silo_growth(numbers, rows_each=5, rounds=16):
    """(e) Silos of five children: time to prepare, to compile a step, and of a step by row, in CPU seconds."""
    print("\n(e) growth with silos of 5 rows, CPU time; ratios to the first line")
    print(
        f"{'silos':>8} {'prepare s':>10} {'compile s':>10} {'ratio':>8} {'ns a row':>10} {'ratio':>8} {'memory MB':>10}"
    )
    first = None
    for num in numbers:
        jax.clear_caches()
        memo.forget()
        prepare, seconds, run = silo_run(num, rows_each)
        by_row = min(cpu_seconds(lambda run=run: run(rounds)) for _ in range(3)) / rounds / (num * rows_each) * 1e9
        first = first or (seconds, by_row)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        ratios = seconds / first[0], by_row / first[1]
        line = f"{num:8d} {prepare:10.2f} {seconds:10.2f} {ratios[0]:8.2f} {by_row:10.0f} {ratios[1]:8.2f}"
        print(f"{line} {memory:10.0f}", flush=True)


def silo_run(num, rows_each):
    """Seconds to prepare and to compile, and a compiled run of so many rounds."""
    children = np.arange(num * rows_each) % len(DATA.smoke)
    data = dict(smoke=DATA.smoke[children], wheeze=DATA.wheeze[children])
    silos = nf.split(np.arange(len(children)) // rows_each, shared=dict(age=DATA.age), **data)
    method = nf.SFVI(model, guide=nf.guides.StructuredNormal(), optim=optax.adam(1e-2), importance_samples=1)
    began = time.process_time()
    _, stack, phase = prepared(method, silos)
    engine, key = nf.engines.Vmap(), jax.random.key(0)
    server, states = engine.start(phase.algorithm, key, stack)
    prepare = time.process_time() - began
    run = lambda count: engine.rounds(phase.algorithm, key, stack, server, states, 0, None, count)
    return prepare, cpu_seconds(lambda: run(1)), run


def cpu_seconds(function):
    began = time.process_time()
    jax.block_until_ready(function())
    return time.process_time() - began


def total_compile(make):
    """A fresh compilation, caches cleared."""
    jax.clear_caches()
    return make()[1]


def unequal_silos(num):
    """The children in silos whose sizes all differ."""
    sizes = np.arange(1, num + 1) / (num * (num + 1) / 2)
    cuts = np.round(np.cumsum(sizes)[:-1] * len(DATA.smoke)).astype(int)
    labels = np.searchsorted(cuts, np.arange(len(DATA.smoke)), side="right")
    return nf.split(labels, shared=dict(age=DATA.age), **rows(1))


def ep_together(silos, num_rounds):
    """Seconds of an EP fit, everything compiled anew; and of its first and second round, warm."""
    jax.clear_caches()
    memo.forget()
    method, key = nf.EP(model, tolerance=0), jax.random.key(0)
    seconds = timed(lambda: method.run(key, silos, num_rounds, progress_bar=False).state.server)
    _, stack, phase = prepared(method, silos)
    engine = nf.engines.Vmap()
    fresh, states = engine.start(phase.algorithm, key, stack)
    server, _ = phase.begin(Left(), fresh)
    one = lambda server, states, r: engine.rounds(phase.algorithm, key, stack, server, states, r, None, 1, phase.effort)
    first = min(timed(lambda: one(server, states, 0)) for _ in range(3))
    server, states, _ = one(server, states, 0)
    return seconds, first, min(timed(lambda: one(server, states, 1)) for _ in range(3))


def ep_apart(silos, num_rounds):
    """Seconds of the same fit silo by silo: nothing padded, a program for each silo."""
    jax.clear_caches()
    memo.forget()

    def run():
        method, key = nf.EP(model, tolerance=0), jax.random.key(0)
        split, stack, phase = prepared(method, silos)
        algorithm = in_user_precision(phase.algorithm, False)
        with jax.enable_x64(True):
            quick = lambda function: jax.jit(function, compiler_options=known(QUICK))
            step, close = quick(algorithm.silo_step), quick(algorithm.server_step)
            server, _ = phase.begin(Left(), algorithm.init(key))
            data = [silo_data(silos, name, split.spec, split.partition.axes) for name in stack.names]
            sent = algorithm.broadcast(key, server)
            states = [algorithm.init_silo(key, sent_to(sent, j), one) for j, one in enumerate(data)]
            for _ in range(num_rounds):
                sent, messages = algorithm.broadcast(key, server), []
                for j, one in enumerate(data):
                    message, states[j] = step(key, sent_to(sent, j), states[j], one)
                    messages.append(message)
                cohort = Cohort(jnp.arange(len(data), dtype=jnp.int32), len(data))
                server, _ = close(key, server, algorithm.aggregate(stacked(messages), cohort))
            return server

    return timed(run)


def main(args):
    repeats = 3 if args.quick else 30
    made = {
        "NumPyro SVI, structured guide": pooled(structured_guide),
        "NumPyro SVI, AutoNormal": pooled(AutoNormal(model)),
        "SFVI, 2 silos (300, 237)": federated(2, labels=DATA.silo),
        "SFVI, 1 silo": federated(1),
        "SFVI, 10 silos": federated(10),
        "SFVI, 100 silos": federated(100),
    }
    steps = fastest({name: run for name, (run, _) in made.items()}, repeats)
    base, auto = steps["NumPyro SVI, structured guide"], steps["NumPyro SVI, AutoNormal"]
    print("(a, b) time per step, 537 children, one draw")
    print(f"{'':32} {'ms':>8} {'/structured':>12} {'/AutoNormal':>12}")
    for name, value in steps.items():
        print(f"{name:32} {value:8.4f} {value / base:12.2f} {value / auto:12.2f}")

    growth(args.quick, max(repeats // 3, 2))
    silo_growth((100, 1_000) if args.quick else (100, 10, 1_000, 10_000))

    print("\n(d) EP, 5 rounds, compilation included, silos of unequal sizes")
    print(f"{'silos':>8} {'together s':>12} {'apart s':>12} {'apart/together':>16} {'round 2/round 1':>16}")
    for num in (5,) if args.quick else (10, 20):
        silos = unequal_silos(num)
        together, first, second = ep_together(silos, 5)
        alone = ep_apart(silos, 5)
        print(f"{num:8d} {together:12.1f} {alone:12.1f} {alone / together:16.2f} {second / first:16.2f}", flush=True)

    tries = 1 if args.quick else 3
    compile_base = min(total_compile(lambda: pooled(structured_guide)) for _ in range(tries))
    print("\n(c) time to compile a step")
    print(f"{'':32} {'s':>8} {'/structured':>12}")
    print(f"{'NumPyro SVI, structured guide':32} {compile_base:8.2f} {1:12.2f}")
    for name, make in {
        "NumPyro SVI, AutoNormal": lambda: pooled(AutoNormal(model)),
        "SFVI, 2 silos": lambda: federated(2, labels=DATA.silo),
        "SFVI, 100 silos": lambda: federated(100),
    }.items():
        seconds = min(total_compile(make) for _ in range(tries))
        print(f"{name:32} {seconds:8.2f} {seconds / compile_base:12.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    main(parser.parse_args())
