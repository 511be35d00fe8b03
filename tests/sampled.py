# SPDX-License-Identifier: Apache-2.0
"""The definition at drawn elements, for convolutions that are too large to compute as a whole.

Operands are functions of the index, hashed with a seed: a device fills an array with them without
reading anything, and NumPy evaluates them at just those indices that meet in an element. Indices
are logical: (N, C, *spatial) and (O, I, *window), as in oracle.py, whose definition this is.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cases import Case

WORK = 1 << 23
"""About how many products are summed for the elements of one result."""

MOST, FEWEST = 256, 4
"""How many elements are drawn, if WORK allows."""

EXACT = 1 << 24
"""Whole numbers up to this are exact in float32."""

_FACTORS = [np.uint32(factor) for factor in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)]
_FACTORS.append(np.uint32(0x165667B1))
_SEEDS = {"x": 1, "w": 2, "y": 3}


class Numbers(NamedTuple):
    """What operands hold."""

    kind: str
    """"integers" from -3 to 3; "signs", which are -1, 0 or 1 and mostly 0, so that long sums stay
    exact; or "reals" between -1 and 1."""

    def fill(self, case: Case, role: str, dtype: str, seed: jax.Array) -> jax.Array:
        """An array in the user's layout. The seed is an argument, lest XLA fold constants."""
        shape, axes = case.shape(role), case.axes(role)
        hashed = jnp.full(shape, _SEEDS[role], jnp.uint32) + seed
        for axis, factor in zip(axes, _FACTORS, strict=False):
            hashed += lax.broadcasted_iota(jnp.uint32, shape, axis) * factor
        return self._number(_mixed(hashed)).astype(jnp.float32).astype(dtype)

    def at(self, role: str, dtype: str, seed: int, *index: Any) -> np.ndarray:
        """The values at indices that broadcast against each other, in float64."""
        hashed = np.full((1,), _SEEDS[role] + seed, np.uint32)
        for numbers, factor in zip(index, _FACTORS, strict=False):
            hashed = hashed + np.asarray(numbers, np.uint32) * factor
        number = self._number(_mixed(hashed)).astype(np.float32)
        return number.astype(jnp.dtype(dtype)).astype(np.float64)

    def _number(self, hashed: Any) -> Any:
        if self.kind == "integers":
            return ((hashed >> 8) % 7).astype("int32") - 3
        if self.kind == "signs":
            byte = hashed >> 24
            return (byte < 32).astype("int32") - (byte >= 224).astype("int32")
        assert self.kind == "reals"
        total = (hashed & 0xFFFF) + (hashed >> 16)  # 17 bits, so that nothing is rounded here
        return total.astype("float32") / np.float32(1 << 16) - np.float32(1)


INTEGERS, SIGNS, REALS = map(Numbers, ("integers", "signs", "reals"))


def exact_numbers(case: Case) -> Numbers:
    """Numbers whose sums of products are exact in float32 in whatever order they are summed."""
    return INTEGERS if max(case.lengths.values()) < EXACT // 4 else SIGNS


def _mixed(hashed: Any) -> Any:
    """Spread what tells indices apart over all bits (the finaliser of MurmurHash3)."""
    hashed = (hashed ^ (hashed >> 16)) * np.uint32(0x85EBCA6B)
    hashed = (hashed ^ (hashed >> 13)) * np.uint32(0xC2B2AE35)
    return hashed ^ (hashed >> 16)


def draw_points(case: Case, role: str, seed: int = 0) -> np.ndarray:
    """Indices of elements, one a row, many of them at an end of some dimension.

    Fewer where the sums are long. Those of a filter share channels, and with them most of the work.
    """
    shape = [case.shape(role)[axis] for axis in case.axes(role)]
    if 0 in shape:
        return np.zeros((0, len(shape)), np.int32)
    rng = np.random.default_rng(seed)
    count = max(FEWEST, min(MOST, WORK // max(1, case.lengths[role])))
    points = np.stack([_draw(rng, size, count) for size in shape], axis=1)
    if role == "w":
        points[:, :2] = np.repeat(points[::FEWEST, :2], FEWEST, axis=0)[:count]
    return points


def _draw(rng: np.random.Generator, size: int, count: int) -> np.ndarray:
    anywhere, ends = rng.integers(0, size, count), rng.integers(0, 2, count) * (size - 1)
    return np.where(rng.random(count) < 0.25, ends, anywhere).astype(np.int32)


def take(array: jax.Array, case: Case, role: str, points: jax.Array) -> jax.Array:
    """The elements of an array in the user's layout at logical indices, one a row."""
    logical = list(points.T)
    return array[tuple(logical[case.axes(role).index(axis)] for axis in range(array.ndim))]


def compute(
    role: str, case: Case, points: np.ndarray, numbers: Numbers, dtypes: dict[str, str], *,
    seed: int = 0, flip: bool = False,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The result at some points, and the same sums over absolute values.

    `dtypes` are those that the values of the two other roles are rounded to.
    """

    def value(role: str, *index: Any) -> np.ndarray:
        return numbers.at(role, dtypes[role], seed, *index)

    elements = {"y": _elements_of_y, "x": _elements_of_x, "w": _elements_of_w}[role]
    exact, magnitude = np.zeros(len(points)), np.zeros(len(points))
    for index, products in elements(case, points, value, flip):
        exact[index] += products.sum()
        magnitude[index] += np.abs(products).sum()
    return exact, magnitude


Elements = Iterator[tuple[int, np.ndarray]]
"""The number of a point, and some of the products that are summed there."""


def _elements_of_y(case: Case, points: np.ndarray, value, flip: bool) -> Elements:
    inputs, outputs = case.c // case.groups, case.k // case.groups
    for index, (n, k, *at) in enumerate(points):
        i, r, _ = zip(*(_meetings(case, j, p=p) for j, p in enumerate(at)), strict=True)
        channel, *mesh = np.ix_(np.arange(inputs), *i)
        taps = np.ix_(np.arange(inputs), *_turned(case, r, flip))
        first = k // outputs * inputs
        yield index, value("x", n, first + channel, *mesh) * value("w", k, *taps)


def _elements_of_x(case: Case, points: np.ndarray, value, flip: bool) -> Elements:
    inputs, outputs = case.c // case.groups, case.k // case.groups
    for index, (n, c, *at) in enumerate(points):
        _, r, p = zip(*(_meetings(case, j, i=i) for j, i in enumerate(at)), strict=True)
        channels = c // inputs * outputs + np.arange(outputs)
        channel, *mesh = np.ix_(channels, *p)
        _, *taps = np.ix_(channels, *_turned(case, r, flip))
        yield index, value("y", n, channel, *mesh) * value("w", channel, c % inputs, *taps)


def _elements_of_w(case: Case, points: np.ndarray, value, flip: bool) -> Elements:
    inputs, outputs = case.c // case.groups, case.k // case.groups
    out = [case.y_shape[axis] for axis in case.axes("y")[2:]]
    images = max(1, (1 << 18) // math.prod(case.size))  # at once, as fits a processor's cache
    sharing: dict[tuple[int, int], list[tuple[int, list[int]]]] = defaultdict(list)
    for index, (k, c, *at) in enumerate(points.tolist()):
        taps = [r - 1 - tap if flip else tap for r, tap in zip(case.window, at, strict=True)]
        sharing[k, c].append((index, taps))
    for (k, c), elements in sharing.items():
        for start in range(0, case.n, images):
            part = np.arange(start, min(case.n, start + images))
            n, *mesh = np.ix_(part, *map(np.arange, case.size))
            x = value("x", n, k // outputs * inputs + c, *mesh)
            n, *mesh = np.ix_(part, *map(np.arange, out))
            dy = value("y", n, k, *mesh)
            for index, taps in elements:
                i, _, p = zip(*(_meetings(case, j, r=r) for j, r in enumerate(taps)), strict=True)
                yield index, x[:, *map(_as_slice, i)] * dy[:, *map(_as_slice, p)]


def _meetings(
    case: Case, dimension: int, *, i: int | None = None, r: int | None = None, p: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The i, r and p that meet in one dimension, where one of the three is given."""
    s, d, low = case.strides[dimension], case.dilation[dimension], case.pads[dimension][0]
    size, out = case.size[dimension], case.y_shape[case.axes("y")[2 + dimension]]
    taps = np.arange(case.window[dimension]) if r is None else np.array([r])
    if i is not None:
        positions, rest = np.divmod(i + low - d * taps, s)
        meet = (rest == 0) & (positions >= 0) & (positions < out)
        return np.full(meet.sum(), i), taps[meet], positions[meet]
    positions = np.arange(out) if p is None else np.array([p])
    taps, positions = np.broadcast_arrays(taps, positions)
    inputs = s * positions + d * taps - low
    meet = (inputs >= 0) & (inputs < size)
    return inputs[meet], taps[meet], positions[meet]


def _turned(case: Case, taps: tuple[np.ndarray, ...], flip: bool) -> list[np.ndarray]:
    pairs = zip(case.window, taps, strict=True)
    return [window - 1 - r if flip else r for window, r in pairs]


def _as_slice(indices: np.ndarray) -> slice:
    """The slice that takes equally spaced indices."""
    if len(indices) == 0:
        return slice(0, 0)
    step = int(indices[1] - indices[0]) if len(indices) > 1 else 1
    return slice(int(indices[0]), int(indices[-1]) + 1, step)
