r"""The round, explained once.

Every method in this library repeats one round:

.. code-block:: text

    broadcast          = b(server)                         at the server
    message_j, silo_j  = u(broadcast, silo_j, data_j)      at silo j, where the data live
    server             = s(server, {message_j})            at the server

A :class:`FederatedAlgorithm` is these functions and nothing else; an engine (:mod:`numpyro_fed.engines`) runs them,
all silos at once in one compiled program or one by one through bytes, without knowing the method.

What an algorithm may rely on, and must obey:

- Nothing leaves a silo but its message; nothing enters it but the broadcast.
- Messages arrive stacked on a leading axis, with a :class:`Cohort` that says who replied. A round is one server update.
- ``broadcast`` and ``server_step`` of a round get the same key; a silo's key is the round's key folded with its name,
  so every engine, cohort and silo order draws the same numbers.
- A silo that does not take part in a round does not move.

A whole algorithm, the mean of numbers that stay apart:

>>> import jax, jax.numpy as jnp
>>> mean = FederatedAlgorithm(
...     init=lambda key: jnp.zeros(()),
...     init_silo=lambda key, broadcast, data: (),
...     broadcast=lambda key, server: Broadcast(common=server, each=()),
...     silo_step=lambda key, broadcast, silo, data: ((jnp.sum(data - broadcast.common), data.size), silo),
...     aggregate=lambda messages, cohort: jax.tree.map(lambda m: jnp.sum(m, axis=0), messages),
...     server_step=lambda key, server, aggregate: (server + aggregate[0] / aggregate[1], {}),
... )
>>> server = mean.init(None)
>>> replies = [mean.silo_step(None, mean.broadcast(None, server), (), jnp.array(x))[0] for x in ([1.0, 2.0], [6.0])]
>>> stacked = jax.tree.map(lambda *m: jnp.stack(m), *replies)
>>> server, info = mean.server_step(None, server, mean.aggregate(stacked, Cohort(jnp.arange(2), 2)))
>>> float(server)
3.0

In an asynchronous run a silo works from the broadcast it received when it last took part, while the server has gone on.
:func:`~numpyro_fed.engines.stale.stale` makes of any algorithm one that does this: who holds what is part of its
server's state, so engines run it as any other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

PyTree = Any
Key = Any


class Broadcast(NamedTuple):
    """What the server sends: ``common`` to everyone, to silo j its own slice of ``each`` (stacked over all silos)."""

    common: PyTree
    each: PyTree = ()


class Cohort(NamedTuple):
    """Who replied: indices into the silos, in the order of the stacked messages, and how many silos there are."""

    index: Any  # int (K,)
    num_silos: int

    @property
    def everyone(self) -> bool:
        """Whether it is known, before the program runs, that all silos replied, in their order."""
        known = isinstance(self.index, np.ndarray) and len(self.index) == self.num_silos
        return known and bool(np.all(self.index == np.arange(self.num_silos)))


# (rng_key) -> server_state. At the server, before anything is sent.
InitFn = Callable[[Key], PyTree]
# (rng_key, broadcast, silo_data) -> silo_state. In the silo; the state stays there.
InitSiloFn = Callable[[Key, Broadcast, PyTree], PyTree]
# (rng_key, server_state) -> Broadcast. What goes down.
BroadcastFn = Callable[[Key, PyTree], Broadcast]
# (rng_key, broadcast, silo_state, silo_data) -> (message, silo_state). The message is all that goes up.
SiloStepFn = Callable[[Key, Broadcast, PyTree, PyTree], tuple[PyTree, PyTree]]
# (messages stacked on axis 0, cohort) -> aggregate. At the server; could be a secure sum.
AggregateFn = Callable[[PyTree, Cohort], PyTree]
# (rng_key, server_state, aggregate) -> (server_state, info). `info` is a dict of arrays: a row of the history.
ServerStepFn = Callable[[Key, PyTree, PyTree], tuple[PyTree, dict[str, Any]]]


class Lost(NamedTuple):
    """What a round does about a silo that was asked, and of which no message came that could be used.

    By default the round goes on with those who replied: right where the server holds a factor of each silo, which then
    stays as it is. A sum or an average over all silos would be another one without it, and holds its last
    contribution instead.
    """

    hold: bool = False
    # (rng_key, server_state, message) -> what is held and aggregated in the message's place; None: the message itself
    absorb: Callable[[Key, PyTree, PyTree], PyTree] | None = None
    server_step: ServerStepFn | None = None  # on the aggregate of these; None: the algorithm's own
    # (server_state) -> whether what was held before this round is of another kind than what comes; None: never
    void: Callable[[PyTree], Any] | None = None


class FederatedAlgorithm(NamedTuple):
    """A federated method, as pure functions on pytrees. See the module's docstring for the rules."""

    init: InitFn
    init_silo: InitSiloFn
    broadcast: BroadcastFn
    silo_step: SiloStepFn
    aggregate: AggregateFn
    server_step: ServerStepFn
    lost: Lost = Lost()  # where messages can be lost

    def traced_once(self) -> "FederatedAlgorithm":
        """The same algorithm, its functions traced once per shapes, however many programs and engines use them."""
        once = lambda function: jax.jit(function, inline=True)
        return self._replace(
            init_silo=once(self.init_silo),
            broadcast=once(self.broadcast),
            silo_step=once(self.silo_step),
            server_step=once(self.server_step),
        )


# --- from the round to a run ------------------------------------------------------------------------------------------


class Left(NamedTuple):
    """What phases leave behind, for those after them and for the fit."""

    warm: Any = None  # a WarmStart (numpyro_fed.local.start): where a mode search, or another fit, ended
    reached: float = 0.0  # log density there
    unsure: bool = False  # the search had not converged: another is made, where the program has one
    server: PyTree = None  # the method's own server state: of its rounds, or of a run that is gone on with
    reasons: tuple[str, ...] = ()  # why the posterior is to be doubted, and what to type
    moving: bool = False  # one of these is that it had not come to rest
    hints: tuple[str, ...] = ()  # what would explain a posterior that is wrong, and by itself does not make it so
    interrupted: bool = False


class Begun(NamedTuple):
    """How a phase begins: the server's half, and what is sent to the silos for theirs."""

    server: PyTree
    given: PyTree = ()


def _begin(left: Left, fresh: PyTree) -> Begun:
    return Begun(fresh if left.server is None else left.server)


def _begin_silo(given: PyTree, silo: PyTree, local: PyTree) -> PyTree:
    return silo


def _finish(left: Left, server: PyTree, info: dict[str, Any]) -> Left:
    return left._replace(server=server)


class Phase(NamedTuple):
    """Run this algorithm, from that state, until then. A run is a few of these, one after another.

    ``role`` says what becomes of it. ``"start"``: it leaves a warm start, and is left out where one is given.
    ``"rounds"``: the method itself; its states are the fit's. Further ones go on with them, where those before had not
    come to rest (``Left.moving``). ``"check"``: one more look at the end, on the silos'
    states as the rounds left them; what is not finite there is left out.
    """

    name: str  # "mode", "rounds", "nodes", "posterior", "correct": also the stream of its random numbers
    algorithm: Any  # a FederatedAlgorithm
    # (left, the algorithm's fresh server state) -> Begun; None: there is nothing to check. At the server.
    begin: Callable[[Left, PyTree], "Begun | None"] = _begin
    # (given, silo state, what a phase or fit before left in this silo, or None) -> silo state. In the silo.
    begin_silo: Callable[[PyTree, PyTree, PyTree], PyTree] = _begin_silo
    num_rounds: int = 1  # at most
    # (info of the last rounds) -> whether nothing moves any more. None: all rounds are done.
    done: Callable[[dict[str, Any]], bool] | None = None
    # (left, server state at the end, info of the last rounds) -> Left; None: nothing finite was met.
    finish: Callable[[Left, PyTree, dict[str, Any]], "Left | None"] = _finish
    # (left.warm, silo state at the end) -> what the next phase may know of its locals. Of a start; in the silo.
    leave_silo: Callable[[PyTree, PyTree], PyTree] | None = None
    cohort: int | None = None  # silos in a round; None: the schedule's (a check asks all, or the next random cohort)
    role: str = "rounds"
    made: Callable[[], "Phase"] | None = None  # () -> the phase itself, of a start that few runs need
    effort: str = "most"  # of the compiler: "most" for thousands of rounds, "some" for tens, "least" for a few
    # how often each number of the data is looked at in all rounds, about; None: often. Where that is little work, the
    # least effort is enough. It does not depend on the number of rounds: a run that goes on is the same program.
    looks_at_data: int | None = None
    look: int | None = None  # rounds between two looks of the host, at most; None: the engine's own number
    remedy: str = "pass a smaller step: optim=optax.adam(1e-3)"  # against a loss that is not finite
    lacks: str = ""  # of a check: what a fit lacks without it
    # (server or silo state) -> the same with shorter steps, for rounds whose loss stopped being finite; None: no such.
    shorter: Callable[[PyTree], PyTree] | None = None
    watched: bool = True  # what is not finite is an error (of a check: is left out)
    variants: tuple[Any, ...] = ()  # other algorithms for the same rounds
    # (server state at the beginning) -> the place among these of the one for rounds that begin there; None: that above
    suited: Callable[[PyTree], int | None] | None = None
    likely: int | None = None  # which of them it will most likely be
    # How silos that are elsewhere make the same functions, from what they know: a kind, and words and numbers. Of the
    # phases of a method's program, "program" and their place in it.
    recipe: tuple[str | int, ...] = ()

    def variant(self, place: int | None) -> "Phase":
        """The same with another of its algorithms."""
        return self if place is None else self._replace(algorithm=self.variants[place], recipe=(*self.recipe, place))

    def shorten(self, given: PyTree, silo: PyTree) -> PyTree:
        """A silo's state with shorter steps. In the silo."""
        assert self.shorter is not None
        return self.shorter(silo)


@runtime_checkable
class Posterior(Protocol):
    """All that a fit, its predictions, corrections, comparisons and files know of a method.

    Bound to one model. What only some posteriors have they offer beside these four, and are asked for it by name:

    - ``family``: what it is made of, a guide or a family of normals. Its ``repr`` is in messages and in files, and a
      file whose method has another is refused.
    - ``to_warm_start(server)`` and ``local_start(warm, silo)`` (:mod:`numpyro_fed.local.start`): a better start for
      another run than its moments.
    - ``sample_with_log_prob`` and ``silo_elbo`` (:class:`numpyro_fed.results.elbo.HasBound`): an evidence bound.
    - ``sites``, ``reordered``, ``joined`` and ``joined_silo`` (:class:`numpyro_fed.results.influence.HasSites`): a
      factor for each silo. ``reordered(server, order)`` is for any server state with an entry for each silo, so that a
      run can go on with the silos in another order. Without ``sites``, ``no_factors`` says why there are none.
    - ``known_to(server, place)``: of a server state with an entry for each silo, what one of them is given when the
      run is over and it is elsewhere: all that draws need, and no other's entry.
    - ``reads_data`` (bool): locals are read off the data by an encoder or a guide function, and so are not drawn
      without them; ``inputs``: the names of the arguments that an encoder reads.
    - ``local_context``, ``sample_local_with_log_prob``, ``local_from_normals`` and ``local_program``
      (:class:`numpyro_fed.run.locals.HasLocals`): the locals' density given the globals, so that a run's check can
      look at them, too.
    - ``marginal`` (:class:`numpyro_fed.local.integrate.Marginal`): how locals were integrated out; a correction takes
      no fewer nodes.
    - ``correction`` and ``uncorrected`` (:class:`numpyro_fed.results.correction.HasCorrection`): it was corrected.
    """

    def sample(self, key: Key, server: PyTree) -> Any:
        """One draw of z_G, unconstrained."""
        ...

    def sample_local(self, key: Key, z: Any, server: PyTree, silo: PyTree, data: Any) -> dict[str, Any]:
        """One draw of z_L given z_G = z, with the rows of ``data``, a SiloData. In the silo."""
        ...

    def theta(self, server: PyTree) -> dict[str, Any]:
        """The model's params, unconstrained."""
        ...

    def normal(self, server: PyTree) -> Any:
        """q(z_G), where it is a normal (:class:`numpyro_fed.normal.gaussian.Normal`); else None."""
        ...


class Program(NamedTuple):
    """What a method compiles to."""

    phases: tuple[Phase, ...]
    posterior: Posterior


class Plan(NamedTuple):
    """What a method may know of a run when it compiles: how long, and who takes part."""

    num_rounds: int | None = None  # as the user says; None: the method's default
    names: Any = ()  # of the silos
    sweep: int = 1  # rounds in which every silo takes part once
    cohort: int | None = None  # silos in a round; None: all of them
    random: bool = False  # cohorts are drawn by chance: those who are asked stand for all
    stale: bool = False  # silos work from what they last received
    check: bool = False  # the fit is checked at the end, and methods need not look themselves

    def visits(self, num_rounds: int) -> float:
        """Of a silo in so many rounds, on average."""
        return num_rounds if self.cohort is None else num_rounds * self.cohort / len(self.names)
