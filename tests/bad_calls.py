# SPDX-License-Identifier: Apache-2.0
"""Random calls that `lax` refuses: valid ones of which one argument is broken, in many ways."""

import inspect
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from test_readings import draw_call

FUNCTIONS = ["conv", "conv_general_dilated", "conv_transpose", "conv_with_general_padding"]
NAN = float("nan")
BEYOND_64_BITS = 2**63

NEEDS_DILATION = "a name where lhs is spread"

Arguments = dict[str, Any]


class Odd:
    """Of no kind that anything takes."""

    def __repr__(self) -> str:
        return "Odd()"


def draw_valid(seed: int, function: str) -> Arguments:
    """Operands, in NumPy, and arguments that both `lax` and jaxcudnn take."""
    if function == "conv_general_dilated":
        lhs, rhs, arguments = draw_call(seed)
        return {"lhs": np.asarray(lhs), "rhs": np.asarray(rhs), **arguments}
    draw = random.Random(seed)
    rank = draw.choice([1, 2])
    ones = (1,) * rank
    sizes, window = [draw.randint(4, 6) for _ in ones], [draw.randint(1, 3) for _ in ones]
    strides = tuple(draw.randint(1, 3) for _ in ones)
    if function == "conv_transpose":
        lhs, rhs = np.ones((2, *sizes, 3), "float32"), np.ones((*window, 3, 4), "float32")
        return {"lhs": lhs, "rhs": rhs, "strides": strides, "padding": ((1, 0),) * rank,
                "rhs_dilation": ones, "dimension_numbers": None, "precision": None}  # fmt: skip
    lhs, rhs = np.ones((2, 3, *sizes), "float32"), np.ones((4, 3, *window), "float32")
    if function == "conv":
        return {"lhs": lhs, "rhs": rhs, "window_strides": strides, "padding": "SAME"}
    return {"lhs": lhs, "rhs": rhs, "window_strides": strides, "padding": ((1, 2),) * rank,
            "lhs_dilation": ones, "rhs_dilation": ones}  # fmt: skip


# A way of breaking an argument of a call gives what is changed and what an error has to show of it.
Broken = tuple[Arguments, str]
Way = Callable[[Arguments, str], Broken]


def value(change: Callable[[Any], Any]) -> Way:
    """Put one value in the place of another."""

    def way(call: Arguments, name: str) -> Broken:
        bad = change(call.get(name))
        return {name: bad}, repr(bad)

    return way


def none(call: Arguments, name: str) -> Broken:
    return {name: None}, "None"


def constant(bad: Any) -> Way:
    return value(lambda _: bad)


def shown(bad: Any, text: str) -> Way:
    return lambda call, name: ({name: bad}, text)


# Floats are not whole, since lax remembers its failure with 1.0 for calls that say 1.
NUMBERS: dict[str, Way] = {
    "an integer": constant(1),
    "a float": constant(1.5),
    "a float within": value(lambda v: (v[0] + 0.5, *v[1:])),
    "not a number within": value(lambda v: (NAN, *v[1:])),
    "none within": value(lambda v: (None, *v[1:])),
    "a string": constant("11"),
    "strings": value(lambda v: ("1",) * len(v)),
    "too many": value(lambda v: (*v, 1)),
    "another number": value(lambda v: v[1:] or v * 3),  # lax takes () for any number of 1
    "zero": value(lambda v: (*v[:-1], 0)),
    "negative": value(lambda v: (*v[:-1], -2)),
    "nested": value(lambda v: [list(v)]),
    "beyond 64 bits": value(lambda v: (BEYOND_64_BITS, *v[1:])),
    "an object": constant(Odd()),
}


def _rank(call: Arguments) -> int:
    return call["lhs"].ndim - 2


def pairs(*pair: Any) -> Way:
    """The same pair for each spatial dimension."""
    return lambda call, name: ({name: (pair,) * _rank(call)}, repr((pair,) * _rank(call)))


def name_with_dilation(call: Arguments, name: str) -> Broken:
    return {name: "SAME", "lhs_dilation": (2,) * _rank(call)}, "'SAME'"


def pairs_of_other_number(add: int) -> Way:
    def way(call: Arguments, name: str) -> Broken:
        bad = ((1, 1),) * (_rank(call) + add)
        return {name: bad}, repr(bad)

    return way


PADDING: dict[str, Way] = {
    "an unknown name": constant("FULL"),
    "no name": constant(""),
    "bytes": constant(b"SAME"),
    "an integer": constant(1),
    "none": none,
    "integers": lambda call, name: ({name: (1,) * _rank(call)}, repr((1,) * _rank(call))),
    "triples": pairs(1, 1, 1),
    "single numbers": pairs(1),
    "floats": pairs(0.5, 1),
    "not a number": pairs(NAN, 1),
    "none within": pairs(None, 1),
    "strings": pairs("a", "b"),
    "too many": pairs_of_other_number(1),
    "too few": pairs_of_other_number(-1),
    "a crop of everything": pairs(-1000, 0),
    "beyond 64 bits": lambda call, name: (
        {name: ((0, BEYOND_64_BITS),) * _rank(call)}, str(BEYOND_64_BITS)
    ),
    NEEDS_DILATION: name_with_dilation,
    "an object": constant(Odd()),
}  # fmt: skip


def both_groups(call: Arguments, name: str) -> Broken:
    counts = {"feature_group_count": 2, "batch_group_count": 2}
    lhs, rhs, images = np.ones((2, 4, 5)), np.ones((4, 2, 3)), ("NCW", "OIW", "NCW")
    geometry = {"window_strides": (1,), "padding": ((0, 0),), "dimension_numbers": images}
    dilations = {"lhs_dilation": (1,), "rhs_dilation": (1,)}
    return {"lhs": lhs, "rhs": rhs, **geometry, **dilations, **counts}, "2 and 2"


def indivisible(call: Arguments, name: str) -> Broken:
    letter = "C" if name == "feature_group_count" else "N"
    size = call["lhs"].shape[call["dimension_numbers"][0].index(letter)]
    counts = {"feature_group_count": 1, "batch_group_count": 1}
    return counts | {name: size + 1}, str(size + 1)


GROUPS: dict[str, Way] = {
    "zero": constant(0),
    "negative": constant(-1),
    "a float": constant(1.5),
    "not a number": constant(NAN),
    "none": none,
    "a string": constant("1"),
    "a tuple": constant((1,)),
    "an object": constant(Odd()),
    "beyond 64 bits": constant(BEYOND_64_BITS),
    "no divisor": indivisible,
    "both": both_groups,
}


def letters(change: Callable[[str, str, str], Any]) -> Way:
    def way(call: Arguments, name: str) -> Broken:
        positions = "DHW"[-_rank(call) :]
        bad = change(f"NC{positions}", f"OI{positions}", f"NC{positions}")
        return {name: bad}, repr(bad)

    return way


def axes(change: Callable[[tuple[int, ...]], Any]) -> Way:
    """The axes of lhs changed in a `jax.lax.ConvDimensionNumbers`."""

    def way(call: Arguments, name: str) -> Broken:
        right = tuple(range(_rank(call) + 2))
        bad = lax.ConvDimensionNumbers(change(right), right, right)
        return {name: bad}, repr(bad)

    return way


DIMENSION_NUMBERS: dict[str, Way] = {
    "a string": constant("NCHW"),
    "a number": constant(4),
    "a dictionary": constant({"lhs": "NCHW"}),
    "an object": constant(Odd()),
    "two": letters(lambda x, w, y: (x, w)),
    "four": letters(lambda x, w, y: (x, w, y, y)),
    "none within": letters(lambda x, w, y: (x, w, None)),
    "bytes": letters(lambda x, w, y: (x.encode(), w.encode(), y.encode())),
    "tuples": letters(lambda x, w, y: (tuple(x), tuple(w), tuple(y))),
    "too short": letters(lambda x, w, y: (x[:-1], w[:-1], y[:-1])),
    "too long": letters(lambda x, w, y: (x + "T", w + "T", y + "T")),
    "one too short": letters(lambda x, w, y: (x, w, y[:-1])),
    "a letter twice": letters(lambda x, w, y: (x[:-1] + "C", w, y)),
    "a position elsewhere": letters(lambda x, w, y: (x, w[:-1] + "T", y)),
    "no images": letters(lambda x, w, y: (x, w, y.replace("N", "B"))),
    "no channels": letters(lambda x, w, y: (x.replace("C", "X"), w, y)),
    "no inputs": letters(lambda x, w, y: (x, w.replace("I", "C"), y)),
    "lower case": letters(lambda x, w, y: (x.lower(), w.lower(), y.lower())),
    "axes that are letters": axes(lambda right: ("N", *right[1:])),
    "axes that are floats": axes(lambda right: (0.5, *right[1:])),
    "an axis twice": axes(lambda right: (right[1], *right[1:])),
    "an axis that there is not": axes(lambda right: (len(right), *right[1:])),
    "an axis from the end": axes(lambda right: (-1, *right[1:])),
    "too few axes": axes(lambda right: right[:-1]),
}

PRECISION: dict[str, Way] = {
    repr(bad): constant(bad)
    for bad in (
        "low", "", "Highest", "float64", b"high", 0, 1.5, True, NAN, Odd(), lax.Precision,
        ("high",), ("high",) * 3, ("high", None), ("high", "low"), {"high": 1},
    )
}  # fmt: skip

# Operands are of float32.
PREFERRED: dict[str, Way] = {
    **{repr(bad): constant(bad) for bad in ("real", "", 1, 0.5, NAN, Odd(), (1,))},
    **{
        name: shown(name, name)
        for name in ("bfloat16", "float16", "int32", "int8", "uint32", "bool", "complex64")
    },
    "object": shown(object, "object"),
    "int": shown(int, "int"),
}

SHARDING: dict[str, Way] = {
    repr(bad): constant(bad) for bad in (1, 0, False, "data", ("x",), [], Odd(), object)
}


def cast(dtype: Any, text: str) -> Way:
    return lambda call, name: ({name: call[name].astype(dtype)}, text)


def reshaped(change: Callable[[tuple[int, ...]], Sequence[int]]) -> Way:
    def way(call: Arguments, name: str) -> Broken:
        shape = tuple(change(call[name].shape))
        return {name: np.ones(shape, "float32")}, repr(shape)

    return way


def other_inputs(call: Arguments, name: str) -> Broken:
    """One channel more in the filter than in the input."""
    if "dimension_numbers" in call and call["dimension_numbers"] is not None:
        axis = call["dimension_numbers"][1].index("I")
    else:
        axis = 1 if "window_strides" in call else call[name].ndim - 2
    shape = list(call[name].shape)
    shape[axis] += 1
    return {name: np.ones(shape, "float32")}, f"{shape[axis]} for "


OPERAND: dict[str, Way] = {
    "a list": lambda call, name: ({name: call[name].tolist()}, "list"),
    "none": shown(None, "NoneType"),
    "a number": shown(1.5, "float"),
    "a string": shown("array", "str"),
    "a scalar": reshaped(lambda shape: ()),
    "an axis too few": reshaped(lambda shape: shape[1:]),
    "an axis too many": reshaped(lambda shape: (1, *shape)),
    "objects": cast(object, "object"),
    "strings": cast(str, "<U"),
    "truth values": cast(bool, "bool"),
    "integers": cast("int32", "int32"),
    "half": cast("float16", "float16"),
    "complex": cast("complex64", "complex64"),
    "a type": lambda call, name: (
        {name: jax.ShapeDtypeStruct(call[name].shape, "float32")}, "ShapeDtypeStruct"
    ),
    "masked": lambda call, name: ({name: np.ma.masked_array(call[name])}, "MaskedArray"),
    "an object": shown(Odd(), "Odd"),
}  # fmt: skip

WAYS: Mapping[str, dict[str, Way]] = {
    "lhs": OPERAND,
    "rhs": OPERAND | {"other channels": other_inputs},
    "window_strides": NUMBERS | {"none": none},
    "strides": NUMBERS | {"none": none},
    "padding": PADDING,
    "lhs_dilation": NUMBERS,
    "rhs_dilation": NUMBERS,
    "dimension_numbers": DIMENSION_NUMBERS,
    "feature_group_count": GROUPS,
    "batch_group_count": GROUPS,
    "precision": PRECISION,
    "preferred_element_type": PREFERRED,
    "out_sharding": SHARDING,
    "transpose_kernel": {},  # anything is true or false
    "use_consistent_padding": {},
}


@dataclass(frozen=True)
class BadCall:
    """What is to be broken; the arrays come only with the test."""

    function: str
    seed: int
    argument: str
    """Which the error has to name."""
    way: str

    def __str__(self) -> str:
        return f"{self.function}-{self.argument}: {self.way}"

    def draw(self) -> tuple[Arguments, str]:
        """The arguments, and what the error has to say that it got."""
        valid = draw_valid(self.seed, self.function)
        changes, shown = WAYS[self.argument][self.way](valid, self.argument)
        return valid | changes, shown


def bad_calls(function: str, number: int) -> list[BadCall]:
    """Spread over the parameters of `lax`'s function and over the ways to break each."""
    parameters = inspect.signature(getattr(lax, function)).parameters
    ways = [
        (name, way)
        for name in parameters
        for way in WAYS[name]
        if way != NEEDS_DILATION or "lhs_dilation" in parameters
    ]
    random.Random(function).shuffle(ways)
    return [
        BadCall(function, seed, *way)
        for seed, way in zip(range(number), itertools.cycle(ways), strict=False)
    ]
