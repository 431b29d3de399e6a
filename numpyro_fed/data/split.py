"""Silos from pooled arrays."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from numpyro_fed.checks import warn_user
from numpyro_fed.data.inputs import check_indices_agree, listed
from numpyro_fed.data.silos import Silos


def split(
    labels: Any,
    groups: Mapping[str, str | None] | None = None,
    shared: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Silos:
    """Silos from pooled arrays: the rows with the same label form a silo.

    Args:
        labels: one label per row; a silo is named by its label.
        groups: ``{index argument: count argument}``. Each named index (``county_idx``) is renumbered from 0 within
            its silo; its count (``num_counties``) becomes the silo's own number of groups, and arrays with one row per
            group follow (``dict(county_idx="uranium")``: one of these may stand for the count). Every group must lie in
            one silo. The count may be None when the model takes none, as where arrays with a row per group tell it; a
            plate whose size is written in the model is the same in all silos, and is refused.
        shared: arguments that are the same in every silo.
        arguments: arrays with one row per label are cut; ints and scalars that are not counts are shared.

    >>> import numpy as np
    >>> y, county = np.ones(3, "f"), np.array([0, 2, 1])
    >>> silos = split(["a", "a", "b"], groups=dict(county="num"), y=y, county=county, num=3)
    >>> silos["a"]["county"].tolist(), silos["a"]["num"], silos["b"]["num"]
    ([0, 1], 2, 1)
    """
    check_indices_agree({"labels": labels, **arguments})
    members = _rows_by_label(labels)
    names = list(members)
    groups = dict(groups or {})
    num_rows = sum(len(rows) for rows in members.values())
    arguments = {argument: listed(value) for argument, value in arguments.items()}
    common = dict(shared or {})
    own: dict[str, dict[str, Any]] = {name: {} for name in names}

    for index, count in groups.items():
        for argument in (index,) if count is None else (index, count):
            if argument not in arguments:
                raise ValueError(f"groups= names {argument!r}, but the arguments are {', '.join(sorted(arguments))}")
    counts = {count: index for index, count in groups.items() if count is not None}
    kept: dict[str, dict[str, np.ndarray]] = {}
    sizes: dict[str, int] = {}
    for index in groups:
        idx = np.asarray(arguments[index])
        if idx.shape != (num_rows,) or not np.issubdtype(idx.dtype, np.integer):
            raise ValueError(f"{index!r} must hold one int per row ({num_rows}), got {idx.dtype} of shape {idx.shape}")
        kept[index] = {name: np.unique(idx[rows]) for name, rows in members.items()}
        owners = Counter(int(group) for found in kept[index].values() for group in found)
        straddling = [group for group, times in owners.items() if times > 1]
        if straddling:
            where = [name for name in names if straddling[0] in kept[index][name]]
            raise ValueError(
                f"group {straddling[0]} of {index!r} has rows in silos {where[0]!r} and {where[1]!r} "
                f"(and {len(straddling) - 1} more): its latents would be sampled once in each. Split by whole groups, "
                f"or leave {index!r} out of groups= to keep its latents global."
            )
        count = groups[index]
        given = None if count is None else arguments[count]
        sizes[index] = int(given) if isinstance(given, int | np.integer) else int(np.max(idx)) + 1
        if given is not None and not isinstance(given, int | np.integer):
            sizes[index] = np.shape(given)[0]
        if np.min(idx) < 0 or np.max(idx) >= sizes[index]:
            raise ValueError(f"{index!r} must lie in 0..{sizes[index] - 1}, got {np.min(idx)}..{np.max(idx)}")
        empty = sizes[index] - len(owners)
        if empty:
            one = empty == 1
            warn_user(
                f"{empty} of {sizes[index]} groups of {index!r} {'has' if one else 'have'} no rows and "
                f"{'is' if one else 'are'} left out"
            )

    for argument, value in arguments.items():
        if argument in groups:
            for name, rows in members.items():
                own[name][argument] = np.searchsorted(kept[argument][name], np.asarray(value)[rows]).astype(np.int32)
            continue
        if argument in counts and isinstance(value, int | np.integer):
            for name in names:
                own[name][argument] = len(kept[counts[argument]][name])
            continue
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(value)}
        if lengths <= {()}:  # numbers
            common[argument] = value
            continue
        cut = _cut_for(argument, lengths, members, kept, sizes, counts)
        for name in names:
            own[name][argument] = jax.tree.map(lambda leaf, rows=cut[name]: np.asarray(leaf)[rows], value)

    silos = Silos(own, shared=common)
    silos.own_counts, silos.renumbered = frozenset(counts), frozenset(groups)
    return silos


def _cut_for(
    argument: str,
    lengths: set[tuple[int, ...]],
    members: dict[str, np.ndarray],
    kept: dict[str, dict[str, np.ndarray]],
    sizes: dict[str, int],
    counts: dict[str, str],
) -> dict[str, np.ndarray]:
    """Which rows of an argument each silo gets: its rows, or its groups' when there is one row per group."""
    num_rows = sum(len(rows) for rows in members.values())
    if argument in counts:
        return kept[counts[argument]]
    if lengths == {(num_rows,)}:
        return members
    level = [index for index in kept if lengths == {(sizes[index],)}]
    if not level:
        got = " and ".join(str(length[0]) if length else "no" for length in sorted(lengths))
        raise ValueError(
            f"argument {argument!r} has {got} rows where the labels have {num_rows}: give one row per label, or pass "
            f"it as shared=dict({argument}=...) when it is the same in every silo"
        )
    for other in level[1:]:
        if any(not np.array_equal(kept[level[0]][name], kept[other][name]) for name in members):
            raise ValueError(
                f"argument {argument!r} has {sizes[other]} rows, as many as there are groups of {level[0]!r} and of "
                f"{other!r}: which does it follow? Say it in groups=dict({other}={argument!r}), or give it by rows "
                f"({argument}[{other}])."
            )
    return kept[level[0]]


def _rows_by_label(labels: Any) -> dict[str, np.ndarray]:
    """{silo name: positions of its rows}, silos in the order in which their labels appear."""
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"labels must hold one label per row, got an array of shape {array.shape}")
    found: dict[str, list[int]] = {}
    kinds: dict[str, Any] = {}
    for row, label in enumerate(array.tolist()):
        if label is None or label != label:
            raise ValueError(f"row {row} has no label ({label}): drop the row, or name a silo for it")
        name = str(label)
        if kinds.setdefault(name, label) != label:
            raise ValueError(f"two labels are written {name!r} ({kinds[name]!r} and {label!r}): give each its own name")
        found.setdefault(name, []).append(row)
    return {name: np.array(rows) for name, rows in found.items()}
