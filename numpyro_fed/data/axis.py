"""A silo's own axis."""

from typing import NamedTuple


class Axis(NamedTuple):
    """A silo's own axis: rows of data, groups of rows. Its length may differ between silos."""

    name: str
    arguments: tuple[str, ...]  # paths of the arguments (arrays by their leading axis, ints by their value)
    plates: tuple[str, ...]
    lengths: dict[str, int]  # by silo
    free: bool = False  # the model can be called with any length: padding may round it up
