"""What the server does with what arrives: a message is used, or refused with the reason.

In this order, cheapest first, so that nothing is computed from what need not be looked at: who it is from, which round
and broadcast it answers, its length, its structure, and whether its numbers are finite.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.engines import wire


class Reply(NamedTuple):
    """What a silo sends: its message in bytes, and what it answers."""

    silo: str
    round: int
    answers: int  # CRC-32 of the broadcast
    data: bytes


class Refused(NamedTuple):
    """Why a reply was not used."""

    silo: str
    why: str
    bytes: int


def opened(
    replies: list[Reply], silo: str, at: int, answers: int, like: Any, watched: bool = True
) -> tuple[Any | None, list[Refused]]:
    """The message of a silo, if one of the replies is good, and what was refused.

    Args:
        silo, at, answers: whose reply is expected, to which round and broadcast.
        like: its message's structure.
        watched: numbers must be finite; a density may be zero somewhere.
    """
    message, refused = None, []
    for reply in replies:
        found, why = _one(reply, silo, at, answers, like, watched)
        if not why and message is not None:
            why = "it had replied already"
        if why:
            refused.append(Refused(reply.silo, why, len(reply.data)))
        else:
            message = found
    return message, refused


def _one(reply: Reply, silo: str, at: int, answers: int, like: Any, watched: bool) -> tuple[Any, str]:
    if reply.silo != silo:
        return None, f"{reply.silo!r} was not asked"
    if reply.round != at:
        return None, f"it answers round {reply.round}, and this is {at}"
    if reply.answers != answers:
        return None, "it answers another broadcast"
    try:
        message = wire.decode(reply.data, like)  # on the host: it is looked at, and stacked with others
    except ValueError as error:
        return None, " ".join(str(error).split())
    where = not_finite(message) if watched else ""
    return (None, f"{where} is not finite") if where else (message, "")


def not_finite(message: Any) -> str:
    """The first leaf of a message with a number that is none; "" where there is no such.

    An infinite number is as bad: a sum with it says nothing any more.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(message):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.all(np.isfinite(np.asarray(leaf))):
            return jax.tree_util.keystr(path).removeprefix(".") or "it"
    return ""
