# SPDX-License-Identifier: Apache-2.0
"""Draws calls of `conv_general_dilated` that `lax` takes, by hypothesis.

JAXCUDNN_SPACE narrows them down, such as '{"dtypes": ["float32"], "ranks": [1, 2]}'.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax

from calls import Call
from definition import spread

# Of the operands, each with what the result may be asked for in.
DTYPES = {
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
    "complex64": ("complex64", "complex128"),
    "complex128": ("complex128",),
    "int8": ("int8", "int16", "int32", "float32"),
    "int16": ("int16", "int32", "float32"),
    "int32": ("int32", "int64"),
    "uint8": ("uint8", "uint16", "int32", "float32"),
    "float8_e4m3fn": ("float8_e4m3fn", "bfloat16", "float16", "float32"),
    "float8_e5m2": ("float8_e5m2", "bfloat16", "float16", "float32"),
}
COMMON = ("float32", "bfloat16", "float16")
X64 = ("float64", "complex128", "int64")  # which JAX has to be told to allow

# Integers whose products and sums are too large for these.
LARGE = {"int8": 127, "int16": 2**15 - 1, "int32": 2**31 - 1, "uint8": 255}
ROUNDED_TWICE = ("float8_e4m3fn", "float8_e5m2")  # by XLA, to float16 first

MANY_PRODUCTS = 300
LETTERS = ("NC", "OI", "NC")
POSITIONS = "DHWTUV"


@dataclass(frozen=True)
class Space:
    """Which calls are drawn."""

    ranks: tuple[int, ...] = (1, 2, 3, 0, 4)
    """Numbers of spatial dimensions, the first three of which are drawn more often."""
    dtypes: tuple[str, ...] = tuple(DTYPES)
    preferred: bool = True
    """Whether results are asked for in some dtype."""
    normal: bool = False
    """Whether there are numbers other than integers."""

    @classmethod
    def narrowed(cls, **fields: Any) -> "Space":
        """Give the space with these fields, and those that JAXCUDNN_SPACE says."""
        said = json.loads(os.environ.get("JAXCUDNN_SPACE", "{}"))
        for name, value in said.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)

    @property
    def text(self) -> str:
        """What JAXCUDNN_SPACE has to be."""
        return json.dumps(asdict(self))


class _Dimension(NamedTuple):
    """The numbers of one spatial dimension."""

    size: int
    window: int
    stride: int
    lhs_dilation: int
    rhs_dilation: int
    padding: tuple[int, int]

    @property
    def products(self) -> int:
        size = spread(self.size, self.lhs_dilation) + sum(self.padding)
        out = (size - spread(self.window, self.rhs_dilation)) // self.stride + 1
        return max(1, out) * max(1, self.window)


# Making a strategy costs more than drawing from it.
_between = lru_cache(st.integers)
_one_of = lru_cache(lambda *choices: st.sampled_from(choices))
_orders = lru_cache(st.permutations)


def _rarely(draw: st.DrawFn, one_in: int) -> bool:
    return draw(_between(1, one_in)) == one_in


def _factor(draw: st.DrawFn, largest: int = 4) -> int:
    """Draw a stride, a dilation or a number of groups, mostly 1."""
    return draw(_between(2, largest)) if largest > 1 and _rarely(draw, 3) else 1


def _dimension(draw: st.DrawFn, roomy: bool) -> _Dimension:
    """Draw a padding that leaves nothing negative, and mostly a window that fits."""
    size = 0 if _rarely(draw, 50) else draw(_between(1, 9 if roomy else 3))
    lhs_dilation = _factor(draw) if roomy else 1
    least = spread(size, lhs_dilation)
    low = draw(_between(-3, 5) if roomy else _between(-1, 2))
    high = draw(_between(max(-3, -low - least), 5 if roomy else 2))
    padded, largest = least + low + high, 5 if roomy else 2
    if _rarely(draw, 25):
        window, rhs_dilation = draw(_between(0, largest)), _factor(draw)
    else:
        window = draw(_between(1, max(1, min(padded, largest))))
        rhs_dilation = _factor(draw, min(4, (padded - 1) // (window - 1)) if window > 1 else 4)
    return _Dimension(size, window, _factor(draw), lhs_dilation, rhs_dilation, (low, high))


def _dimension_numbers(draw: st.DrawFn, rank: int) -> lax.ConvGeneralDilatedDimensionNumbers:
    """Draw none, channels last, or any permutations, as letters or as numbers."""
    positions = POSITIONS[:rank]
    kind = draw(_one_of("first", "last", "letters", "letters", "numbers"))
    if kind == "first":
        return None
    if kind == "last":
        return f"N{positions}C", f"O{positions}I", f"N{positions}C"
    texts = ["".join(draw(_orders(letters + positions))) for letters in LETTERS]
    if kind == "letters":
        return texts[0], texts[1], texts[2]
    names = [letters + positions for letters in LETTERS]
    orders = [[*map(text.index, name)] for text, name in zip(texts, names, strict=True)]
    return lax.ConvDimensionNumbers(*map(tuple, orders))


def _element_type(draw: st.DrawFn, space: Space, x64: bool) -> tuple[str, str | None, int | None]:
    """Draw the operands' dtype, the one asked for, and the largest integer, None for others."""
    dtypes = [dtype for dtype in space.dtypes if x64 or dtype not in X64]
    dtype = draw(_one_of(*(name for name in COMMON if name in dtypes), *dtypes))
    preferred = None
    if space.preferred and draw(st.booleans()):
        preferred = draw(_one_of(*(name for name in DTYPES[dtype] if x64 or name not in X64)))
    if dtype in LARGE:
        wraps = "int" in (preferred or dtype) and draw(st.booleans())
        return dtype, preferred, LARGE[dtype] if wraps else 3
    normal = space.normal and dtype not in ROUNDED_TWICE and _rarely(draw, 8)
    return dtype, preferred, None if normal else 3


@st.composite
def calls(draw: st.DrawFn, space: Space) -> Call:
    """Draw a call that `lax` takes, or one with an empty window, for which it has only a type."""
    rank = draw(_one_of(*space.ranks[:3] * 4, *space.ranks[3:]))
    drawn, products = [], 1
    for _ in range(rank):
        drawn.append(_dimension(draw, products < MANY_PRODUCTS))
        products *= drawn[-1].products
    dimensions = [drawn[index] for index in draw(_orders(range(rank)))]
    sizes, window, strides, lhs_dilation, rhs_dilation, padding = (
        zip(*dimensions, strict=True) if dimensions else ((),) * 6
    )
    groups, n, inputs, outputs = (
        _factor(draw), *(0 if _rarely(draw, 60) else draw(_between(1, 3)) for _ in range(3))
    )  # fmt: skip
    feature, batch = draw(_one_of((1, groups), (groups, 1)))
    lhs_shape = (n * batch, inputs * feature, *sizes)
    rhs_shape = (outputs * groups, inputs, *window)
    numbers = _dimension_numbers(draw, rank)
    layout = lax.conv_dimension_numbers(lhs_shape, rhs_shape, numbers)
    ones = (1,) * rank
    if lhs_dilation == ones and _rarely(draw, 4):
        padding = draw(_one_of("VALID", "SAME", "SAME_LOWER", "same"))
    x64 = set(space.dtypes) <= set(X64) or draw(st.booleans())
    dtype, preferred, largest = _element_type(draw, space, x64)
    return Call(
        lhs_shape=_placed(lhs_shape, layout.lhs_spec),
        rhs_shape=_placed(rhs_shape, layout.rhs_spec),
        dtype=dtype,
        window_strides=strides,
        padding=padding,
        lhs_dilation=draw(_one_of(None, ones)) if lhs_dilation == ones else lhs_dilation,
        rhs_dilation=draw(_one_of(None, ones)) if rhs_dilation == ones else rhs_dilation,
        dimension_numbers=numbers,
        feature_group_count=feature,
        batch_group_count=batch,
        precision=draw(_one_of(None, "highest")),
        preferred_element_type=preferred,
        seed=draw(_between(0, 99)),
        largest=largest,
        gradient="int" not in dtype and _rarely(draw, 4),
        x64=x64,
    )


def _placed(logical: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """Put one number for each logical dimension at its axis."""
    return tuple(logical[list(axes).index(axis)] for axis in range(len(axes)))


def draw(visit: Callable[[Call], Any], count: int, space: Space, seed: int) -> None:
    """Visit so many calls, which the seed determines; if one raises, look for the smallest.

    Raises:
      Exception: what `visit` raised for the smallest call that was found.
    """

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(calls(space))
    def property_of(call: Call) -> None:
        visit(call)

    property_of()


def distinct(count: int, space: Space, seed: int) -> list[Call]:
    """Draw so many calls that differ."""
    drawn: dict[Call, None] = {}
    draw(drawn.setdefault, attempts(count), space, seed)
    return list(drawn)[:count]


def attempts(count: int) -> int:
    """Give how many draws that takes, since hypothesis repeats itself now and then."""
    return count + count // 2 + 20


def share(index: int, of: int, count: int) -> list[Call]:
    """Draw one process's share of the calls, for `many.run`."""
    return distinct(_share(index, of, count), Space.narrowed(), index)


def draw_share(visit: Callable[[Call], Any], index: int, of: int, count: int, space: Space) -> None:
    """Visit what `share` draws."""
    draw(visit, attempts(_share(index, of, count)), space, index)


def _share(index: int, of: int, count: int) -> int:
    return count // of + (index < count % of)
