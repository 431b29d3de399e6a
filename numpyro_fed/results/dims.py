"""Names of dimensions and labels of rows, for all silos side by side."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.model.forward import value_axes
from numpyro_fed.model.partition_table import Site
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array | np.ndarray


class Labelled(NamedTuple):
    """One silo's rows beside another's."""

    values: np.ndarray
    at: int  # which axis, sample axes not counted
    labels: list[str]
    silos: list[str]


class Dims:
    """Dimension names of a split model's sites: their plates', or the silo's axis' where there is no plate."""

    def __init__(self, split: SplitModel, events: dict[str, int]) -> None:
        self.split, self.events = split, events
        self.taken = {"chain", "draw", "silo", *(site.name for site in split.partition.sites)}
        self.names: dict[Any, str] = {}

    def _name(self, wanted: str, kind: Any = None) -> str:
        """A name that is neither a site's nor another dimension's; the same for the same kind of dimension."""
        if (wanted, kind) not in self.names:
            name = wanted
            while name in self.taken:
                name += "_dim"
            self.taken.add(name)
            self.names[wanted, kind] = name
        return self.names[wanted, kind]

    def _plates(self, site: Site, shape: tuple[int, ...], event: int) -> dict[int, str]:
        """Plates by their dims, counted from the right; of a deterministic site only if its shape says so."""
        plates = [(plate, dim - event, size) for plate, dim, size in site.shape.plates]
        computed = site.role == "deterministic"
        own = {dim for _, dim in site.value_axes}
        if computed and any(len(shape) < -dim or (shape[dim] != size and dim not in own) for _, dim, size in plates):
            return {}
        return {dim: plate for plate, dim, _ in plates}

    def _event(self, site: Site) -> int:
        if site.role == "observed":
            return self.events[site.name]
        return 0 if site.shape.log_prob is None else len(site.shape.value) - len(site.shape.log_prob)

    def of_server(self, name: str, value: Array) -> Any:
        """Draws of a global site."""
        site = self.split.partition[name]
        values = np.asarray(value)
        plates = self._plates(site, values.shape[1:], self._event(site))
        return self._array(name, values, {dim: self._name(plate) for dim, plate in plates.items()}, {})

    def joined(self, name: str, by_silo: Mapping[str, Array], sample: bool = True) -> Any:
        """Values of a silo's site, all silos' rows in one dimension, or one entry a silo."""
        site = self.split.partition[name]
        return self._joined(site, value_axes(site, self.events), self._event(site), by_silo, sample)

    def densities(self, site: Site, by_silo: Mapping[str, Array], counts: Mapping[str, Array]) -> Any:
        """Log densities of an observed site, without the rows that the model's mask leaves out."""
        found = self._joined(site, site.axes, 0, by_silo, True)
        if not site.axes or all(bool(np.all(one)) for one in counts.values()):
            return found
        keep = self._joined(site, site.axes, 0, counts, False)
        rows = next(str(dim) for dim in found.dims if f"{dim}_silo" in found.coords)
        keep = keep.any([dim for dim in keep.dims if dim != rows]).values
        name = self._name(f"{site.name}_{rows}")  # another length, another dimension
        return found.isel({rows: np.flatnonzero(keep)}).rename({rows: name, f"{rows}_silo": f"{name}_silo"})

    def _joined(
        self, site: Site, along: tuple[tuple[str, int], ...], event: int, by_silo: Mapping[str, Array], sample: bool
    ) -> Any:
        arrays = {silo: np.asarray(value) for silo, value in by_silo.items()}
        first, lead = next(iter(arrays)), int(sample)
        shape = arrays[first].shape[lead:]
        plates = self._plates(site, shape, event)
        own = [dim for _, dim in along]
        named = {dim: self._name(plate) for dim, plate in plates.items() if dim not in own}
        if not along:
            values = np.stack(list(arrays.values()), axis=lead)
            return self._array(site.name, values, named | {-len(shape) - 1: "silo"}, {"silo": list(arrays)}, sample)
        lengths = self.split.partition.lengths(first)
        rows = "_".join(self._name(plates.get(dim, axis), Fraction(shape[dim], lengths[axis])) for axis, dim in along)
        if len(along) > 1:  # crossed axes become the first, and the others move together
            rows = self._name(rows, "crossed")
            others = [dim for dim in range(-len(shape), 0) if dim not in own]
            named = {i - len(others): named[dim] for i, dim in enumerate(others) if dim in named}
        found = [_rows(silo, value, tuple(own), lead) for silo, value in arrays.items()]
        values = np.concatenate([one.values for one in found], axis=found[0].at + lead)
        coords = {
            rows: [label for one in found for label in one.labels],
            f"{rows}_silo": (rows, [silo for one in found for silo in one.silos]),
        }
        return self._array(site.name, values, {**named, found[0].at - values.ndim + lead: rows}, coords, sample)

    def _array(
        self, name: str, values: np.ndarray, named: dict[int, str], coords: dict[str, Any], sample: bool = True
    ) -> Any:
        import xarray

        rank = values.ndim - int(sample)
        dims = [named.get(i - rank, f"{name}_dim_{i}") for i in range(rank)]
        if sample:
            values, dims = values[None], ["chain", "draw", *dims]
        index = {dim: np.arange(n) for dim, n in zip(dims, values.shape, strict=True) if dim not in coords}
        return xarray.DataArray(values, dims=dims, coords={**index, **coords}, name=name)


def _rows(silo: str, value: np.ndarray, along: tuple[int, ...], lead: int) -> Labelled:
    """One silo's values with its own axes made one, and a label for each row."""
    if len(along) == 1:
        at = value.ndim + along[0]
        labels = [f"{silo}[{i}]" for i in range(value.shape[at])]
        return Labelled(value, at - lead, labels, [silo] * len(labels))
    sizes = tuple(value.shape[dim] for dim in along)
    value = np.moveaxis(value, along, range(lead, lead + len(along)))
    value = value.reshape(value.shape[:lead] + (int(np.prod(sizes)),) + value.shape[lead + len(along) :])
    labels = [f"{silo}[{', '.join(map(str, index))}]" for index in np.ndindex(*sizes)]
    return Labelled(value, 0, labels, [silo] * len(labels))
