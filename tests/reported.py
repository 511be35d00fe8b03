# SPDX-License-Identifier: Apache-2.0
"""The convolutions that users of other libraries reported as slow, failing or wrong.

data/reported_convolutions.json has one entry for each report, in the words of the reporter's
library. Here each becomes a `Reported`: its forward convolution as a `Case`, and the three passes
as functions of whatever computes convolutions. An entry that is a sweep becomes one for each number
of dimensions; bias, activation and scale are left out.

A transposed convolution is the input gradient of a forward one. It is written as
`jax.lax.conv_transpose` writes it, a convolution of a dilated input with the filter as it is, also
where the reporter's library is PyTorch, which reverses the filter: the sizes are the same.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cases import Case

DATA = Path(__file__).parent / "data" / "reported_convolutions.json"

PASSES = ("fwd", "dgrad", "wgrad")

Convolve = Callable[..., jax.Array]
"""`jax.lax.conv_general_dilated`, or a function with its parameters."""

MEETINGS = 1500
"""How many pairs of an output position and a tap are kept in a reduced size, if that can be."""

LONGEST = 1000
"""How many taps a reduced window may have in one dimension."""

SWEEP = {
    "ndim": (1, 2, 3),
    "kernel": (1, 2, 3),
    "stride": (1, 2),
    "pad": (0, 1, 2),
    "dilation": (1, 2, 3, 4, 5),
    "groups": (1, 2, 4, 8),
}
"""The values of the sweep that chainer#7187 reports, the same in all spatial dimensions."""


@dataclass(frozen=True)
class Reported:
    """One convolution. Roles x, w and y are those of the forward convolution `case`."""

    name: str
    case: Case
    dtype: str
    result: str
    """The dtype of the forward pass's result; that of the operands if nothing else was asked."""
    transposed: bool = False

    @property
    def passes(self) -> tuple[str, ...]:
        """All three; whole numbers have no gradients."""
        return PASSES if jnp.issubdtype(self.dtype, jnp.floating) else PASSES[:1]

    @property
    def strided(self) -> bool:
        return max(self.case.strides) > 1

    def roles(self, which: str) -> tuple[str, str, str]:
        """The roles of a pass's two operands and of its result."""
        source, target = "yx" if self.transposed else "xy"
        return {
            "fwd": (source, "w", target),
            "dgrad": (target, "w", source),
            "wgrad": (source, target, "w"),
        }[which]

    def dtype_of(self, role: str) -> str:
        """The dtype of an array and of its gradient."""
        return self.result if role == self.roles("fwd")[2] else self.dtype

    def aval(self, role: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.case.shape(role), jnp.dtype(self.dtype_of(role)))

    def function(self, which: str, convolve: Convolve, **options: Any) -> Callable[..., jax.Array]:
        """A pass as a function of its operands, gradients as JAX takes them of the forward pass."""
        source = self.aval(self.roles("fwd")[0])

        def forward(a, w):
            return convolve(a, w, **self.arguments, **options)

        def dgrad(ct, w):
            return jax.linear_transpose(lambda a: forward(a, w), source)(ct)[0]

        def wgrad(a, ct):
            return jax.linear_transpose(lambda w: forward(a, w), self.aval("w"))(ct)[0]

        return {"fwd": forward, "dgrad": dgrad, "wgrad": wgrad}[which]

    @property
    def arguments(self) -> dict[str, Any]:
        """What `conv_general_dilated` takes beside the operands in the forward pass."""
        preferred = {} if self.result == self.dtype else {"preferred_element_type": self.result}
        case = self.case
        if not self.transposed:
            return case.arguments | preferred
        x, w, y = case.dimension_numbers
        return {
            "window_strides": (1,) * len(case.size),
            "padding": _other_padding(case.pads, case.window, case.dilation),
            "lhs_dilation": case.strides,
            "rhs_dilation": case.dilation,
            "dimension_numbers": (y, _exchanged(w), x),
            **preferred,
        }

    def shrunk(self) -> "Reported":
        return reduced(self)

    def __str__(self) -> str:
        case = self.case
        sizes = ["x".join(map(str, numbers)) for numbers in (case.size, case.window)]
        parts = [f"{case.n}x{case.c}x{sizes[0]} to {case.k}", sizes[1]]
        if self.transposed:
            inputs = "x".join(str(case.shape("y")[axis]) for axis in case.axes("y"))
            parts[0] = f"transposed {inputs} to {case.c}"
        for letter, numbers in (("/", case.strides), ("d", case.dilation)):
            if max(numbers) > 1:
                parts[1] += letter + "x".join(map(str, dict.fromkeys(numbers)))
        if case.groups > 1:
            parts.append("depthwise" if case.groups == case.c else f"{case.groups} groups")
        dtype = self.dtype if self.result == self.dtype else f"{self.dtype} in {self.result}"
        return " ".join([*parts, dtype, case.dimension_numbers[0]])


def load() -> list[Reported]:
    """All of them, at the sizes that were reported."""
    found: list[Reported] = []
    for entry in json.loads(DATA.read_text()):
        repository, number = entry["source"].split("#")
        name = f"{repository.split('/')[1]}#{number}"
        for suffix, one in _expand(entry):
            found.append(_reported(name + suffix, one))
    names = [reported.name for reported in found]
    return [
        replace(one, name=f"{one.name}-{names[:index].count(one.name) + 1}")
        if names.count(one.name) > 1
        else one
        for index, one in enumerate(found)
    ]


def load_sweep() -> list[Reported]:
    """Convolutions of the sweep, such that every two values of different parameters meet in one."""
    (entry,) = (entry for entry in json.loads(DATA.read_text()) if "ndim" not in entry)
    parameters = list(itertools.combinations(SWEEP, 2))

    def pairs(drawn: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, drawn[a], b, drawn[b]) for a, b in parameters}

    random_ = random.Random(0)
    missing = {(a, i, b, j) for a, b in parameters for i in SWEEP[a] for j in SWEEP[b]}
    found = []
    while missing:
        candidates = [
            {name: random_.choice(values) for name, values in SWEEP.items()} for _ in range(50)
        ]
        best = max(candidates, key=lambda drawn: len(missing & pairs(drawn)))
        missing -= pairs(best)
        n = best["ndim"]
        geometry: dict[str, Any] = {
            key: [best[key]] * n for key in ("kernel", "stride", "dilation")
        }
        geometry |= {"pad": [[best["pad"]] * 2] * n, "spatial": entry["spatial"] * n}
        name = "-".join(f"{key}{value}" for key, value in best.items())
        found.append(_reported(name, entry | {"ndim": n, "groups": best["groups"]} | geometry))
    return found


def _expand(entry: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Give the entries that an entry stands for, with what tells them apart."""
    if "ndim" not in entry:
        lists = ("spatial", "kernel", "stride", "pad", "dilation")
        return [
            (f"-{n}d", entry | {"ndim": n} | {key: entry[key] * n for key in lists})
            for n in (1, 2, 3)
        ]
    if entry["dtype"].startswith("float8"):
        return [(f"-{result}", entry | {"result": result}) for result in ("float32", "bfloat16")]
    if entry["dtype"] == "int8":
        return [("", entry | {"result": "int32"})]
    return [("", entry)]


def _reported(name: str, entry: dict[str, Any]) -> Reported:
    torch = entry["source"].startswith("pytorch/") and "JAX" not in entry["layout"]
    positions = "DHW"[3 - entry["ndim"] :]
    if entry["layout"].startswith("NC"):
        images, filters = f"NC{positions}", f"OI{positions}"
    else:
        images, filters = f"N{positions}C", f"O{positions}I" if torch else f"{positions}IO"
    size, window, strides, dilation = (
        tuple(entry[key]) for key in ("spatial", "kernel", "stride", "dilation")
    )
    c, k, named = entry["c"], entry["k"], isinstance(entry["pad"], str)
    padding: Any = entry["pad"] if named else tuple((low, high) for low, high in entry["pad"])
    if entry["transposed"]:
        c, k = k, c
        if named:
            padding = tuple(map(_same_of_transposed, window, strides))
        if not torch:
            # PyTorch names padding and a filter's channels as in the forward convolution, `lax`
            # the other way about.
            padding = _other_padding(padding, window, dilation)
            filters = _exchanged(filters)
        size = tuple(
            s * (out - 1) + d * (r - 1) + 1 - low - high
            for out, r, s, d, (low, high) in zip(
                size, window, strides, dilation, padding, strict=True
            )
        )
    case = Case(
        name, entry["n"], c, k, size, window, padding, strides, dilation, entry["groups"],
        (images, filters, images),
    )  # fmt: skip
    result = entry.get("result", entry["dtype"])
    return Reported(name, case, entry["dtype"], result, entry["transposed"])


def _exchanged(filters: str) -> str:
    return filters.translate(str.maketrans("OI", "IO"))


def _same_of_transposed(window: int, stride: int) -> tuple[int, int]:
    """Padding of the dilated input that makes the output `stride` times as large, as in `lax`."""
    total = window + stride - 2
    low = window - 1 if stride > window - 1 else -(-total // 2)
    return low, total - low


def _other_padding(
    padding: Sequence[tuple[int, int]], window: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The padding of the dilated input from that of the forward convolution, or back."""
    reach = [d * (r - 1) for r, d in zip(window, dilation, strict=True)]
    return tuple((n - low, n - high) for n, (low, high) in zip(reach, padding, strict=True))


def reduced(reported: Reported) -> Reported:
    """The same convolution at a size that the definition in NumPy takes some milliseconds for.

    Window, strides, dilation, padding, layout and dtypes stay, since they are what makes an entry
    peculiar; only a dimension with more than LONGEST taps is divided, window and stride alike.
    Batch: 2, or 3 if it was odd. Channels of a group: if more than 8, 4 to 7, by their remainder
    modulo 4. Groups: at most 8, so that depthwise stays depthwise. Positions are taken off in whole
    strides, so that as many at the end stay out of the window's reach. As far as MEETINGS allow,
    every tap of the window still meets the input; where they do not, the first dimensions keep that
    longest. Which reading suits the reduced size may differ.
    """
    case = _narrowed(reported.case)
    groups = min(case.groups, 8)
    out = [case.y_shape[axis] for axis in case.axes("y")[2:]]
    kept = _reduced_positions(case, out)
    smaller = replace(
        case,
        n=case.n if case.n <= 2 else 2 + case.n % 2,
        c=groups * _few(case.c // case.groups),
        k=groups * _few(case.k // case.groups),
        groups=groups,
        size=tuple(
            size - s * (before - after)
            for size, s, before, after in zip(case.size, case.strides, out, kept, strict=True)
        ),
    )
    return replace(reported, case=smaller)


def _narrowed(case: Case) -> Case:
    """Divide window and stride of the dimensions in which the window has too many taps."""
    divisors = [
        next((f for f in range(1, r) if r <= LONGEST * f and r % f == s % f == 0), 1)
        for r, s in zip(case.window, case.strides, strict=True)
    ]
    if max(divisors) == 1:
        return case
    assert set(case.dilation) == {1} and not any(map(any, case.pads)), case
    size, window, strides = (
        tuple(number // f for number, f in zip(numbers, divisors, strict=True))
        for numbers in (case.size, case.window, case.strides)
    )
    return replace(case, size=size, window=window, strides=strides)


def _few(channels: int) -> int:
    return channels if channels <= 8 else 4 + channels % 4


def _reduced_positions(case: Case, out: Sequence[int]) -> list[int]:
    """How many output positions each dimension keeps."""
    geometry = [*zip(case.size, out, case.window, case.strides, case.dilation, case.pads)]  # noqa: B905

    def least(axis: int) -> int:
        """So few that every tap still meets the input, if it did before."""
        size, positions, r, s, d, (low, _) = geometry[axis]
        first = -(-low // s) + 1
        last = positions - (size - 1 - (d * (r - 1) - low)) // s
        return min(positions, max(2, first, last))

    def meetings(axis: int, kept: int) -> int:
        size, positions, r, s, d, (low, _) = geometry[axis]
        shorter = size - s * (positions - kept)
        return sum(0 <= s * p + d * tap - low < shorter for p in range(kept) for tap in range(r))

    axes = range(len(out))
    lower = [*map(least, axes)]
    kept = [max(low, min(positions, 24)) for low, positions in zip(lower, out, strict=True)]
    counts = [*map(meetings, axes, kept)]
    while math.prod(counts) > MEETINGS:
        whole = [axis for axis in axes if kept[axis] > lower[axis]]
        broken = [axis for axis in axes if kept[axis] > 2]
        if not broken:
            break
        axis = max(whole, key=lambda axis: kept[axis]) if whole else broken[-1]
        kept[axis] -= 1
        counts[axis] = meetings(axis, kept[axis])
    return kept
