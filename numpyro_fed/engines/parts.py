"""A program in three parts: what does most of a round's work is optimised, what stands around it is not.

The compiler tries equally hard everywhere in a program. A round of EP is some hundred small operations on matrices of a
few numbers and a large one, the density of all rows at all points; to optimise the small ones takes seconds and gains
microseconds. So the function that does the work is marked (:func:`numpyro_fed.equations.works`), and a traced program
is cut there: all that comes before the marked call, the call, and all that comes after it are programs of their own. Of
these only the call is optimised.

The call may stand in loops. What comes before it then begins with the first step of each, and what comes after it goes
on to the program's end, as if each loop had that one step. Where the host sees that a loop goes on, it begins the next
step, with a fourth program, makes the call again and what comes after it again, and what had been found before is
forgotten. What is computed is the same.

>>> from numpyro_fed.equations import works
>>> heavy = works(lambda x: jnp.sum(jnp.cos(x)))
>>> program = lambda n, x: jax.lax.fori_loop(0, n, lambda i, total: total + heavy(x * total), x[0])
>>> x = jnp.arange(3.0) + 1
>>> cut = parts_of(jax.jit(program).trace(3, x), program, {}, {})
>>> [bool(jnp.allclose(cut(n, x), program(n, x))) for n in (0, 1, 3)]
[True, True, True]
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from numpyro_fed.equations import as_jaxpr, evaluated, is_work
from numpyro_fed.pieces import unwrapped

Name = Hashable  # a variable of some jaxpr, or what stands between two of them


class Stretch(NamedTuple):
    """Equations one after another, and the names of what they take and give; None: it is given as it is."""

    jaxpr: Jaxpr | None
    ins: tuple[Any, ...]  # names, or literals
    outs: tuple[Name, ...]
    constants: tuple[Any, ...] = ()


class Loop(NamedTuple):
    """One that the call stands in."""

    carried: tuple[Name, ...]  # as a step takes it
    next: tuple[Name, ...]  # as a step leaves it
    goes_on: Name  # what a step begins with: whether there is one
    then: Name  # what it ends with
    before: list[Stretch]  # of a step, what comes before the call


class Cut(NamedTuple):
    """A jaxpr, cut at its marked call."""

    before: list[Stretch]
    call: JaxprEqn
    after: list[Stretch]
    loops: list[Loop]  # the outermost first


class Piece:
    """One program, lowered when it is made or when it is needed."""

    def __init__(self, stretches: Sequence[Stretch], avals: dict[Name, Any], options: dict[str, Any]) -> None:
        self._stretches, self._avals, self._options = stretches, avals, options
        made: set[Name] = set()
        takes: dict[Name, None] = {}
        same: dict[Name, Any] = {}  # what is another by a second name: the host knows it, and nothing is copied
        for stretch in stretches:
            takes |= dict.fromkeys(name for name in stretch.ins if not isinstance(name, Literal) and name not in made)
            made |= set(stretch.outs)
            if stretch.jaxpr is None:
                given = (name if isinstance(name, Literal) else same.get(name, name) for name in stretch.ins)
                same |= zip(stretch.outs, given, strict=True)
        self.takes, self.makes, self._same = tuple(takes), made, same
        self._gives: tuple[Name, ...] = ()
        self._again: tuple[tuple[Name, Any], ...] = ()
        self._lock = threading.Lock()
        self._lowered: Any = None
        self._compiled: Any = None

    def _run(self, *values: Any) -> list[Any]:
        known = dict(zip(self.takes, values, strict=True))
        for jaxpr, ins, outs, constants in self._stretches:
            given = [_read(known, name) for name in ins]
            known |= zip(outs, given if jaxpr is None else evaluated(jaxpr, constants, given), strict=True)
        return [known[name] for name in self._gives]

    def give(self, names: Sequence[Name]) -> None:
        """What it is to leave."""
        self._again = tuple((name, self._same[name]) for name in names if name in self._same)
        own = [name for name in names if name not in self._same]
        first = [name for _, name in self._again if not isinstance(name, Literal) and name not in self.takes]
        self._gives = tuple(dict.fromkeys((*own, *first)))

    def lower(self) -> None:
        shapes = [_shape(self._avals[name]) for name in self.takes]
        self._lowered = jax.jit(self._run, compiler_options=self._options).lower(*shapes)

    def compile(self) -> None:
        with self._lock:
            if self._compiled is None:
                if self._lowered is None:
                    self.lower()
                self._compiled, self._lowered = self._lowered.compile(), None

    def __call__(self, known: dict[Name, Any]) -> None:
        if self._compiled is None:
            self.compile()
        known |= zip(self._gives, self._compiled(*(known[name] for name in self.takes)), strict=True)
        known |= {name: _read(known, other) for name, other in self._again}


class Parts:
    """The program, called as the traced function is; ``whole`` is that function, for loops that have no step."""

    def __init__(self, closed: Any, cut: Cut, whole: Callable, structure: Any, quickly: dict, well: dict) -> None:
        self._whole, self._structure, self._loops = whole, structure, cut.loops
        self._names, self._outs = tuple(closed.jaxpr.invars), tuple(closed.jaxpr.outvars)
        call = _stretch([cut.call])
        avals = {var: var.aval for var in (*closed.jaxpr.invars, *call.ins, *call.outs)}
        for stretch in (*cut.before, *cut.after):
            if stretch.jaxpr is None:
                avals |= {out: _aval(avals, name) for name, out in zip(stretch.ins, stretch.outs, strict=True)}
            else:
                avals |= {name: var.aval for name, var in zip(stretch.outs, stretch.jaxpr.outvars, strict=True)}
        self._first, self._last = Piece(cut.before, avals, quickly), Piece(cut.after, avals, quickly)
        self._call = Piece([call], avals, well)
        self._again = [Piece(loop.before, avals, quickly) for loop in cut.loops]
        pieces = (self._first, self._call, self._last, *self._again)
        needed = {name for piece in pieces for name in piece.takes} | _names(self._outs)
        needed |= {name for loop in cut.loops for name in (*loop.next, loop.goes_on, loop.then)}
        for piece in pieces:
            wanted = piece.makes & needed
            piece.give([name for name in avals if name in wanted])
        self.pieces = self._call, self._first, self._last  # what every run needs; the longest to compile first
        for piece in self.pieces:
            piece.lower()

    def __call__(self, *args: Any) -> Any:
        known = dict(zip(self._names, jax.tree.leaves(args), strict=True))
        self._first(known)
        inside = [known[loop.goes_on] for loop in self._loops]
        while True:
            self._call(known)
            self._last(known)
            if not all(_any(entered) for entered in inside):
                return self._whole(*args)
            on = [place for place, loop in enumerate(self._loops) if _any(known[loop.then])]
            if not on:
                return jax.tree.unflatten(self._structure, [_read(known, name) for name in self._outs])
            loop = self._loops[on[-1]]  # the innermost: what is outside of it has not been reached yet
            given = [known[name] for name in (*loop.next, loop.then)]
            known |= zip((*loop.carried, loop.goes_on), given, strict=True)
            self._again[on[-1]](known)
            inside[on[-1] + 1 :] = [known[inner.goes_on] for inner in self._loops[on[-1] + 1 :]]


def parts_of(traced: Any, whole: Callable, quickly: dict[str, Any], well: dict[str, Any]) -> Parts | None:
    """A traced program, cut; None where no call in it is marked, or several are.

    Args:
        quickly, well: the compiler's options for what is not marked, and for what is.
    """
    closed = unwrapped(traced.jaxpr)
    cut = _cut(closed)
    if cut is None:
        return None
    return Parts(closed, cut, whole, jax.tree.structure(traced.out_info), quickly, well)


def _cut(closed: Any) -> Cut | None:
    eqns = closed.jaxpr.eqns
    places = [place for place, eqn in enumerate(eqns) if is_work(eqn) or _loops_over_work(eqn)]
    if len(places) != 1:
        return None
    place = places[0]
    before, eqn, after = [_stretch(eqns[:place])], eqns[place], [_stretch(eqns[place + 1 :])]
    if closed.consts:
        before.insert(0, _constants(closed))
    if is_work(eqn):
        return Cut(before, eqn, after, [])
    cond, body, num, skip = (eqn.params[name] for name in ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"))
    inner = _cut(body)
    if inner is None:
        return None
    of_cond, of_body, first = eqn.invars[:num], eqn.invars[num : num + skip], eqn.invars[num + skip :]
    carried, last = tuple(body.jaxpr.invars[skip:]), tuple(body.jaxpr.outvars)
    goes_on, then, new = object(), object(), tuple(object() for _ in carried)
    entered = [
        Stretch(None, (*of_body, *first), tuple(body.jaxpr.invars)),
        Stretch(cond.jaxpr, (*of_cond, *carried), (goes_on,), tuple(cond.consts)),
    ]
    kept = Stretch(None, last, new)
    if cond.out_avals[0].shape:
        # members of a vectorised loop that have come to an end stay as they are while others go on
        shapes = [_shape(aval) for aval in (cond.out_avals[0], *[var.aval for var in carried] * 2)]
        kept = Stretch(jax.make_jaxpr(_chosen)(*shapes).jaxpr, (goes_on, *last, *carried), new)
    left = [
        kept,
        Stretch(cond.jaxpr, (*of_cond, *new), (then,), tuple(cond.consts)),
        Stretch(None, new, tuple(eqn.outvars)),
    ]
    loop = Loop(carried, new, goes_on, then, inner.before)
    return Cut([*before, *entered, *inner.before], inner.call, [*inner.after, *left, *after], [loop, *inner.loops])


def _chosen(goes_on: Any, *values: Any) -> list[Any]:
    """What was computed in those members that go on, of the others what was there before."""
    half = len(values) // 2
    wide = lambda like: jnp.reshape(goes_on, (*goes_on.shape, *[1] * (like.ndim - goes_on.ndim)))
    return [jnp.where(wide(new), new, old) for new, old in zip(values[:half], values[half:], strict=True)]


def _stretch(eqns: Sequence[JaxprEqn]) -> Stretch:
    jaxpr: Any = as_jaxpr(eqns)
    return Stretch(jaxpr, tuple(jaxpr.invars), tuple(jaxpr.outvars))


def _constants(closed: Any) -> Stretch:
    names = tuple(closed.jaxpr.constvars)
    nothing = closed.jaxpr.replace(invars=(), outvars=names, eqns=(), effects=frozenset())
    return Stretch(nothing, (), names, tuple(closed.consts))


def _loops_over_work(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "while":
        return False
    return any(is_work(inner) or _loops_over_work(inner) for inner in eqn.params["body_jaxpr"].jaxpr.eqns)


def _any(flags: Any) -> bool:
    return bool(np.any(np.asarray(flags)))


def _aval(avals: dict[Name, Any], name: Any) -> Any:
    return name.aval if isinstance(name, Literal) else avals[name]


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _names(atoms: Any) -> set[Name]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _read(known: dict[Name, Any], name: Any) -> Any:
    return name.val if isinstance(name, Literal) else known[name]
