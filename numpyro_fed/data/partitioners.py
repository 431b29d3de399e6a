r"""Ways to cut pooled data into silos, for experiments.

A partitioner returns one silo for each row, 0 to ``num_silos - 1``; :func:`numpyro_fed.split` takes it from there.
Laws: every silo has a row, and the same seed gives the same silos.

=========================  ===============================================================
:func:`homogeneous`        silos of one size, at random
:func:`by_label`           each class spread unevenly: silos differ in their classes
:func:`by_quantity`        silos differ in their sizes alone
:func:`inhomogeneous`      half of the silos small, half large, with their own class shares
=========================  ===============================================================

>>> import numpyro_fed as nf
>>> x, y = np.arange(6.0, dtype="f"), np.array([0, 1, 0, 1, 0, 1])
>>> silos = nf.split(homogeneous(len(y), num_silos=3), x=x, y=y)
>>> silos.num_silos, [len(silos[name]["y"]) for name in silos.names]
(3, [2, 2, 2])
"""

import math
from typing import Any, NamedTuple

import numpy as np

from numpyro_fed.checks import check_count, is_number

ROUNDING = 1e-9  # of a share times a number: 0.95 * 20 is 19


def homogeneous(num_rows: int, num_silos: int, seed: int = 0) -> np.ndarray:
    """Silos of one size (they differ by one row at most), each a random sample of the rows.

    Args:
        num_rows: n, the number of rows.
        num_silos: J, the number of silos.
        seed: an int; the same seed gives the same silos.

    Returns:
        The silo of each row, int (n,).

    >>> np.bincount(homogeneous(10, num_silos=3)).tolist()
    [4, 3, 3]
    """
    n, num_silos = _counts(num_rows, num_silos)
    return _generator(seed).permutation(np.arange(n) % num_silos)


def by_label(y: Any, num_silos: int, concentration: float = 0.3, min_rows: int = 1, seed: int = 0) -> np.ndarray:
    r"""Label skew: each class is spread over the silos by a Dirichlet draw of its own.

    .. math::

        (s_{c1}, \dots, s_{cJ}) \sim \mathrm{Dirichlet}(\alpha, \dots, \alpha)

    for every class c, and silo j has the share :math:`s_{cj}` of the rows of class c. A large :math:`\alpha` gives all
    silos the pooled class shares, a small one leaves a class to few silos. Sizes differ, too. A silo that got fewer
    than ``min_rows`` is filled up afterwards, by a random row at a time of whichever silo is then the largest.

    Args:
        y: the label of each row, (n,), numbers or strings.
        num_silos: J, the number of silos.
        concentration: :math:`\alpha`.
        min_rows: the rows that every silo has at least.
        seed: an int; the same seed gives the same silos.

    Returns:
        The silo of each row, int (n,).

    Example:
        >>> y = np.repeat([0, 1], 50)
        >>> silo = by_label(y, num_silos=3, concentration=0.3)
        >>> [np.bincount(y[silo == j], minlength=2).tolist() for j in range(3)]
        [[21, 40], [23, 8], [6, 2]]

    References:
        Yurochkin et al. (2019), Bayesian nonparametric federated learning of neural networks, who spread classes over
        silos as here; Hsu, Qi and Brown (2019), Measuring the effects of non-identical data distribution for federated
        visual classification, who draw the classes of silos of equal size.
    """
    labels = _labels(y)
    n, num_silos = _counts(len(labels), num_silos, min_rows)
    alpha, generator = _concentration(concentration), _generator(seed)
    silo = np.empty(n, np.int64)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        silo[rows] = _cut(len(rows), generator.dirichlet(np.full(num_silos, alpha)))
    return _filled_up(silo, num_silos, int(min_rows), generator)


def by_quantity(
    num_rows: int, num_silos: int, concentration: float = 0.5, min_rows: int = 1, seed: int = 0
) -> np.ndarray:
    r"""Quantity skew: the silos' shares of the rows are a draw of Dirichlet(:math:`\alpha, \dots, \alpha`).

    Which rows a silo has is random, so silos differ in size alone. A silo that got fewer than ``min_rows`` is filled up
    as in :func:`by_label`.

    Args:
        num_rows: n, the number of rows.
        num_silos: J, the number of silos.
        concentration: :math:`\alpha`. Large: equal sizes.
        min_rows: the rows that every silo has at least.
        seed: an int; the same seed gives the same silos.

    Returns:
        The silo of each row, int (n,).

    Example:
        >>> np.bincount(by_quantity(100, num_silos=4)).tolist()
        [24, 1, 54, 21]

    Reference:
        Li, Diao, Chen and He (2022), Federated learning on non-IID data silos: an experimental study.
    """
    n, num_silos = _counts(num_rows, num_silos, min_rows)
    generator = _generator(seed)
    silo = _cut(n, generator.dirichlet(np.full(num_silos, _concentration(concentration))))
    return _filled_up(generator.permutation(silo), num_silos, int(min_rows), generator)


def inhomogeneous(
    y: Any, num_silos: int, kappa: float = 0.9, beta: float = 0.95, seed: int = 0, scheme: str = "text"
) -> np.ndarray:
    r"""Half of the silos small, half large, with their own shares of the positives.

    Split B of Bronckers is ``kappa=0.9, beta=0.95`` with ten silos. Its text and the code behind its tables read these
    two numbers differently. With n rows, P of them positive, and J silos:

    - ``scheme="text"``: the large silos hold the share beta of the rows and kappa of the positives,

      .. math::

          n_\text{large} = \frac{\beta n}{J/2}, \quad P_\text{large} = \frac{\kappa P}{J/2}, \qquad
          n_\text{small} = \frac{(1-\beta) n}{J/2}, \quad P_\text{small} = \frac{(1-\kappa) P}{J/2},

      up to rounding: both halves' totals are rounded to whole rows, and silos of a half differ by one row and one
      positive at most. Small silos have *more* positives than others where positives are few: 48 % of Adult's rows,
      where 24 % are positive. ``kappa=0.5, beta=0.5`` gives all silos the same rows and positives.
    - ``scheme="code"``: kappa is a size factor and beta a class balance factor. A small silo has :math:`1 - \kappa`
      times the rows of an equal split, and among them :math:`1 - \beta` times the pooled share of positives,

      .. math::

          n_\text{small} = \Big\lfloor \frac{(1-\kappa) n}{J} \Big\rfloor, \qquad P_\text{small} = n_\text{small}
          - \Big\lfloor n_\text{small} \Big(1 - (1-\beta) \frac{P}{n}\Big) \Big\rfloor,

      and the large ones have the rest in equal parts: 95 % of the rows, and on Adult 99.7 % of the positives; small
      silos are 1.3 % positive.

    Silos 0 to J/2 - 1 are the small ones.

    Args:
        y: the label of each row, (n,), 0 or 1.
        num_silos: J, an even number.
        kappa: ``"text"``: the large silos' share of the positives, 0 to 1. ``"code"``: the size factor, 0 to below 1.
        beta: ``"text"``: the large silos' share of the rows, at least 0.5 and less than 1. ``"code"``: the class
            balance factor, at most 1; below 0 small silos have more positives than the pooled data.
        seed: an int; the same seed gives the same silos.
        scheme: ``"text"`` or ``"code"``.

    Returns:
        The silo of each row, int (n,).

    Example:
        >>> y = np.repeat([1, 0], [100, 300])
        >>> silo = inhomogeneous(y, num_silos=4)
        >>> np.bincount(silo).tolist(), np.bincount(silo[y == 1]).tolist()
        ([10, 10, 190, 190], [5, 5, 45, 45])
        >>> silo = inhomogeneous(y, num_silos=4, scheme="code")
        >>> np.bincount(silo).tolist(), np.bincount(silo[y == 1]).tolist()
        ([10, 10, 190, 190], [1, 1, 49, 49])

    References:
        Ashman et al. (2022), Partitioned variational inference: a framework for probabilistic federated learning, for
        the scheme with factors; Bronckers, Global inducing point posterior approximations for federated Bayesian neural
        networks, section 5.2, for the two shares.
    """
    labels = _labels(y)
    n, num_silos = _counts(len(labels), num_silos)
    if not np.all(np.isin(labels, [0, 1])):
        raise ValueError(
            f"y must be 0 or 1, got {', '.join(map(str, np.unique(labels)[:5]))}: say which label is positive, "
            "inhomogeneous(y == 1, ...)"
        )
    if num_silos % 2:
        raise ValueError(f"half of the silos are small: num_silos must be even, got {num_silos}")
    if scheme not in ("text", "code"):
        raise ValueError(f"scheme must be 'text' or 'code' (what kappa and beta mean), got {scheme!r}")
    positive = labels == 1
    halves = _by_shares if scheme == "text" else _by_factors
    small, large = halves(n, int(positive.sum()), num_silos // 2, kappa, beta)
    sizes, of_them = small.rows + large.rows, small.positives + large.positives
    generator, silo = _generator(seed), np.empty(n, np.int64)
    silo[positive] = generator.permutation(np.repeat(np.arange(num_silos), of_them))
    silo[~positive] = generator.permutation(np.repeat(np.arange(num_silos), np.subtract(sizes, of_them)))
    return silo


class _Half(NamedTuple):
    """Silos of one kind: how many rows each has, and how many positives."""

    rows: list[int]
    positives: list[int]


def _by_shares(n: int, num_positives: int, half: int, kappa: Any, beta: Any) -> tuple[_Half, _Half]:
    """Small and large silos, where the large ones have the share beta of the rows and kappa of the positives."""
    if not is_number(kappa) or not 0 <= kappa <= 1:
        raise ValueError(f"kappa is the large silos' share of the positives, 0 to 1, got {kappa!r}: kappa=0.9")
    if not is_number(beta) or not 0.5 <= beta < 1:
        raise ValueError(f"beta is the large silos' share of the rows, 0.5 to below 1, got {beta!r}: beta=0.95")
    large, large_positives = _rounded(beta * n), _rounded(kappa * num_positives)
    rows = {"small": n - large, "large": large}
    positives = {"small": num_positives - large_positives, "large": large_positives}
    if rows["small"] < half:
        raise ValueError(
            f"beta={beta} leaves {rows['small']} of {n} rows for {half} small silos: take a smaller beta or fewer silos"
        )
    for name in ("small", "large"):
        if positives[name] > rows[name]:
            raise ValueError(
                f"kappa={kappa} gives the {name} silos {positives[name]} of {num_positives} positives, and beta={beta} "
                f"{rows[name]} of {n} rows: take a {'larger' if name == 'small' else 'smaller'} kappa or a "
                f"{'smaller' if name == 'small' else 'larger'} beta"
            )
    each = [_Half(_even(rows[name], half), _even(positives[name], half)) for name in ("small", "large")]
    return each[0], each[1]


def _by_factors(n: int, num_positives: int, half: int, kappa: Any, beta: Any) -> tuple[_Half, _Half]:
    """Small and large silos, where kappa is the size factor and beta the class balance factor."""
    if not is_number(kappa) or not 0 <= kappa < 1:
        raise ValueError(f"kappa is the size factor in scheme='code', 0 to below 1, got {kappa!r}: kappa=0.9")
    if not is_number(beta) or not beta <= 1:
        raise ValueError(f"beta is the class balance factor in scheme='code', at most 1, got {beta!r}: beta=0.95")
    rows = math.floor((1 - kappa) * n / (2 * half) + ROUNDING)
    if rows < 1:
        raise ValueError(f"kappa={kappa} leaves no row for a small silo: take a smaller kappa or fewer silos")
    positives = rows - math.floor(rows * (1 - (1 - beta) * num_positives / n) + ROUNDING)
    rest, rest_positives = n - half * rows, num_positives - half * positives
    if positives > rows or not 0 <= rest_positives <= rest:
        raise ValueError(
            f"beta={beta} asks for {positives} positives in each small silo of {rows} rows, with {num_positives} "
            f"positives in {n} rows: take a beta nearer to 0"
        )
    return _Half([rows] * half, [positives] * half), _Half(_even(rest, half), _even(rest_positives, half))


# --- parts ------------------------------------------------------------------------------------------------------------


def _cut(num_rows: int, shares: np.ndarray) -> np.ndarray:
    """The silo of each row, when the rows are cut in order at the rounded cumulative shares: none is off by a row."""
    ends = np.round(np.cumsum(shares)[:-1] * num_rows)
    return np.searchsorted(ends, np.arange(num_rows), side="right")


def _even(total: int, parts: int) -> list[int]:
    """Whole numbers that differ by one at most; the larger ones first, for rows and positives alike."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def _filled_up(silo: np.ndarray, num_silos: int, min_rows: int, generator: np.random.Generator) -> np.ndarray:
    """A random row of the largest silo goes to one that is short, until none is.

    The largest has one to give: there are J times ``min_rows`` rows, so while a silo is short another has too many.
    """
    sizes = np.bincount(silo, minlength=num_silos)
    for short in np.flatnonzero(sizes < min_rows):
        while sizes[short] < min_rows:
            largest = int(np.argmax(sizes))
            silo[generator.choice(np.flatnonzero(silo == largest))] = short
            sizes[largest] -= 1
            sizes[short] += 1
    return silo


def _rounded(value: float) -> int:
    return math.floor(value + 0.5 + ROUNDING)


def _counts(num_rows: Any, num_silos: Any, min_rows: Any = 1) -> tuple[int, int]:
    if np.ndim(num_rows):
        raise ValueError(
            f"num_rows must be an int of at least 1, got an array of shape {np.shape(num_rows)}: pass len(y)"
        )
    for name, value in (("num_rows", num_rows), ("num_silos", num_silos), ("min_rows", min_rows)):
        check_count(name, value)
    if num_rows < num_silos * min_rows:
        raise ValueError(
            f"{num_silos} silos of at least {min_rows} row{'s' * (min_rows > 1)} need {num_silos * min_rows} rows, got "
            f"{num_rows}: take fewer silos" + " or a smaller min_rows" * (min_rows > 1)
        )
    return int(num_rows), int(num_silos)


def _labels(y: Any) -> np.ndarray:
    labels = np.asarray(y)
    if labels.ndim != 1 or not labels.size:
        raise ValueError(f"y must hold one label for each row, (n,), got an array of shape {labels.shape}")
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        raise ValueError(f"y has NaN, first in row {int(np.argmax(np.isnan(labels)))}: drop these rows")
    return labels


def _concentration(value: Any) -> float:
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"concentration must be a positive number, got {value!r}: concentration=0.3")
    return float(value)


def _generator(seed: Any) -> np.random.Generator:
    return np.random.default_rng(check_count("seed", seed, least=0))
