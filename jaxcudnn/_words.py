# SPDX-License-Identifier: Apache-2.0
"""Short words for convolutions, dtypes and plans, as tables have them."""

from collections.abc import Iterable, Sequence
from typing import Any

from ._spec import ConvSpec, Layout

_SHORT = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"))
_NOTES = ("CUDNN_NUMERICAL_NOTE_", "CUDNN_BEHAVIOR_NOTE_")


def short_dtype(name: str) -> str:
    """Shorten the name of a dtype: 'bf16', 'f32', 'i8'."""
    for long, short in _SHORT:
        name = name.replace(long, short)
    return name


def dtypes(first: str, second: str, result: str) -> str:
    """Write the dtypes of two operands and the result, as one if they are one."""
    operands = (
        short_dtype(first) if first == second else f"{short_dtype(first)}*{short_dtype(second)}"
    )
    return operands if first == second == result else f"{operands}->{short_dtype(result)}"


def product(shapes: Iterable[Sequence[Any]]) -> str:
    """Write operands' shapes: '8x32x32x16 * 32x3x3x16'."""
    return " * ".join("x".join(map(str, shape)) or "()" for shape in shapes)


def geometry(spec: ConvSpec) -> str:
    """Write what is unusual about a convolution's geometry: '/2 pad 1 dil 2 groups 4 flip'."""
    parts = []
    if any(stride != 1 for stride in spec.strides):
        parts.append("/" + _each(spec.strides))
    if any(map(any, spec.padding)):
        pads = [f"{low}" if low == high else f"{low}:{high}" for low, high in spec.padding]
        parts.append("pad " + _each(pads))
    if any(step != 1 for step in spec.dilation):
        parts.append("dil " + _each(spec.dilation))
    if spec.groups != 1:
        parts.append(f"groups {spec.groups}")
    if spec.flip:
        parts.append("flip")
    return " ".join(parts)


def of_spec(spec: ConvSpec) -> str:
    """Write the forward convolution, channels first: '8x16x32x32 * 32x16x3x3 /2 pad 1 f32'."""
    kinds = list(dict.fromkeys(spec.dtypes))
    kind = "/".join(map(short_dtype, spec.dtypes if len(kinds) > 1 else kinds))
    parts = (product((spec.x_shape, spec.w_shape)), geometry(spec), kind)
    return " ".join(part for part in parts if part)


def convolution(op: str, spec: ConvSpec) -> str:
    """Write the operation and the forward convolution."""
    return f"{op} of {of_spec(spec)}"


def layout_letters(layout: Layout) -> str:
    """Write the orders of dimensions as `lax` does: 'NHWC/OHWI', with y's if it is not x's."""
    positions = {1: "W", 2: "HW", 3: "DHW"}
    num_spatial = len(layout.x) - 2
    letters = positions.get(num_spatial, "".join(map(str, range(num_spatial))))
    orders = [
        "".join(names[axes.index(axis)] for axis in range(len(axes)))
        for names, axes in zip(
            ("NC" + letters, "OI" + letters, "NC" + letters), layout, strict=True
        )
    ]
    return "/".join(orders[:2] if orders[2] == orders[0] else orders)


def notes(plan_notes: Iterable[str]) -> list[str]:
    """Shorten cuDNN's notes on a plan: 'tensor core', 'runtime compilation'."""
    short = []
    for note in plan_notes:
        for prefix in _NOTES:
            note = note.removeprefix(prefix)
        short.append(note.lower().replace("_", " "))
    return short


def size(number: float) -> str:
    """Write a number of bytes: '0 B', '12.5 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if number == round(number) else f"{number:.1f} {unit}"


def microseconds(number: float | None) -> str:
    """Write a time to three digits and without exponent; nothing for a time not known."""
    if number is None:
        return ""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _each(values: Sequence[Any]) -> str:
    """Write one number for each dimension, or the one number that all have."""
    return str(values[0]) if len(set(values)) == 1 else ",".join(map(str, values))
