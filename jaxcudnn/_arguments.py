# SPDX-License-Identifier: Apache-2.0
"""Reading what users write: every check of an argument, and the text of every error about one."""

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.export import is_symbolic_dim

from ._readings import Call
from ._spec import ConvSpec, Layout, Pads, Role, Shape, extent

MAX_NUMBER = 2**31 - 1  # of strides, paddings and the like, which XLA and cuDNN compute with


class Caller(NamedTuple):
    """The public function that was called, and its words for what the checks speak of."""

    function: str
    x: str
    w: str
    y: str
    strides: str = "stride"
    dilation: str = "dilation"
    groups: str = "groups"
    """Empty if the function has none."""
    inputs: str = "input channels"
    """Which channels of w are summed over."""
    order: str = (
        "if dimension_numbers are not the default, check that they are those of these arrays"
    )
    """What to do about channels that do not agree."""

    def __str__(self) -> str:
        return f"jaxcudnn.{self.function}"


def make_spec(
    caller: Caller, x_shape: Shape, w_shape: Shape, groups: int, **fields: Any
) -> ConvSpec:
    """Check that the channels of x, the filter and the groups agree, and build the spec."""
    channels, outputs, inputs = x_shape[1], w_shape[0], w_shape[1]
    if groups < 1:
        raise ValueError(
            f"{caller}: {caller.groups} must be at least 1, got {groups}; leave it out for 1"
        )
    if channels % groups or outputs % groups:
        raise ValueError(
            f"{caller}: {caller.groups} must divide the channels of {caller.x} and the output "
            f"channels of {caller.w}, got {caller.groups} {groups} for {channels} and {outputs}; "
            f"choose a common divisor of the two"
        )
    if channels // groups != inputs:
        raise ValueError(
            f"{caller}: the input channels of {caller.w} must number the channels of {caller.x} "
            f"divided by {caller.groups}, got {inputs} for {channels} // {groups}; "
            f"{caller.order}"
        )
    return ConvSpec(x_shape=x_shape, w_shape=w_shape, groups=groups, **fields)


def complete_shapes(
    caller: Caller, shapes: Mapping[Role, Shape], spatial_shape: Any, groups: Any
) -> tuple[Shape, Shape, int]:
    """Give the shapes of x and w and the number of groups, from the shapes of any two roles.

    If y is the third, x and w show the groups by their channels, as in cuDNN. Otherwise groups
    and spatial shape of the third are the user's to say.
    """
    if "y" not in shapes:
        return shapes["x"], shapes["w"], _infer_groups(caller, shapes["x"][1], shapes["w"][1])
    groups = parse_int(caller, caller.groups, groups)
    missing = "x" if "w" in shapes else "w"
    name = f"{getattr(caller, missing)}_spatial_shape"
    sizes = parse_sizes(caller, name, spatial_shape, len(shapes["y"]) - 2)
    n, k = shapes["y"][:2]
    if missing == "x":
        return (n, shapes["w"][1] * groups, *sizes), shapes["w"], groups
    return shapes["x"], (k, shapes["x"][1] // max(1, groups), *sizes), groups


def _infer_groups(caller: Caller, channels: int, inputs: int) -> int:
    groups = channels // inputs if inputs else 1
    if groups < 1 or groups * inputs != channels:
        raise ValueError(
            f"{caller}: the channels of {caller.x} must be a multiple of the input channels of "
            f"{caller.w}, got {channels} and {inputs}; {caller.order}"
        )
    return groups


def check_loss_shape(caller: Caller, spec: ConvSpec, layout: Layout, y_shape: Shape) -> None:
    """Check a gradient of the output against the output that the rest implies."""
    if y_shape != spec.y_shape:
        raise ValueError(
            f"{caller}: {caller.y} must have the shape of the forward convolution's output, "
            f"{layout.to_array('y', spec.y_shape)}, got {layout.to_array('y', y_shape)}; check "
            f"padding, stride, dilation and the spatial shape that was given"
        )


def check_call(caller: Caller, call: Call) -> None:
    """Check that channels, images and groups of a call agree, and that something is left of lhs."""
    n, channels, *sizes = call.lhs_shape
    outputs, inputs, *_ = call.rhs_shape
    for name, groups in (
        (caller.groups, call.feature_groups), ("batch_group_count", call.batch_groups)
    ):  # fmt: skip
        if groups < 1:
            raise ValueError(
                f"{caller}: {name} must be at least 1, got {groups}; leave it out for 1"
            )
        if outputs % groups:
            raise ValueError(
                f"{caller}: {name} must divide the output channels of {caller.w}, got {name} "
                f"{groups} for {outputs}; choose a divisor"
            )
    if call.feature_groups > 1 and call.batch_groups > 1:
        raise ValueError(
            f"{caller}: at most one of feature_group_count and batch_group_count may be more than "
            f"1, got {call.feature_groups} and {call.batch_groups}; leave one of them out"
        )
    if channels % call.feature_groups:
        raise ValueError(
            f"{caller}: {caller.groups} must divide the channels of {caller.x}, got "
            f"{caller.groups} {call.feature_groups} for {channels}; choose a divisor"
        )
    if n % call.batch_groups:
        raise ValueError(
            f"{caller}: batch_group_count must divide the images of {caller.x}, got "
            f"batch_group_count {call.batch_groups} for {n}; choose a divisor"
        )
    if channels // call.feature_groups != inputs:
        divided = f" divided by {caller.groups}" if caller.groups else ""
        quotient = f"{channels} // {call.feature_groups}" if caller.groups else f"{channels}"
        raise ValueError(
            f"{caller}: the {caller.inputs} of {caller.w} must number the channels of {caller.x}"
            f"{divided}, got {inputs} for {quotient}; {caller.order}"
        )
    dilated = [extent(size, b) for size, b in zip(sizes, call.lhs_dilation, strict=True)]
    padded = [size + low + high for size, (low, high) in zip(dilated, call.padding, strict=True)]
    if any(size < 0 for size in padded):
        raise ValueError(
            f"{caller}: negative padding must not crop more than there is, got padding "
            f"{call.padding} for spatial sizes {tuple(dilated)}; crop less"
        )


def parse_layout(caller: Caller, dimension_numbers: Any, num_spatial: int) -> Layout:
    """Read `dimension_numbers` in any of the forms that `lax` takes."""
    axes = range(num_spatial + 2)
    if dimension_numbers is None:
        return Layout(*(tuple(axes),) * 3)
    if isinstance(dimension_numbers, lax.ConvDimensionNumbers):
        rule = (
            f"{caller}: dimension_numbers must be three permutations of the axes 0 to {axes[-1]}, "
            f"got {dimension_numbers}; write three strings instead"
        )
        try:
            layout = Layout(*(tuple(map(operator.index, order)) for order in dimension_numbers))
        except TypeError as error:
            raise TypeError(rule) from error
        if any(sorted(positions) != list(axes) for positions in layout):
            raise ValueError(rule)
        return layout
    if not (
        isinstance(dimension_numbers, (tuple, list))
        and len(dimension_numbers) == 3
        and all(isinstance(letters, str) for letters in dimension_numbers)
    ):
        raise TypeError(
            f"{caller}: dimension_numbers must be None, three strings or a "
            f"jax.lax.ConvDimensionNumbers, got {dimension_numbers!r}; for two spatial dimensions "
            f"write ('NHWC', 'OHWI', 'NHWC'), for example"
        )
    # Spatial dimensions count in the order in which the filter names them.
    spatial = [letter for letter in dimension_numbers[1] if letter not in "OI"]
    names = [["N", "C", *spatial], ["O", "I", *spatial], ["N", "C", *spatial]]
    for letters, expected in zip(dimension_numbers, names, strict=True):
        if sorted(letters) != sorted(expected) or len(set(letters)) != len(axes):
            raise ValueError(
                f"{caller}: dimension_numbers must name each of {len(axes)} axes by a letter of "
                f"its own, two of them N and C, or O and I for {caller.w}, and the others the same "
                f"in all three, got {tuple(dimension_numbers)}; for two spatial dimensions write "
                f"('NHWC', 'OHWI', 'NHWC'), for example"
            )
    return Layout(
        *(
            tuple(map(letters.index, order))
            for letters, order in zip(dimension_numbers, names, strict=True)
        )
    )


def check_name(caller: Caller, name: Any) -> None:
    """Check a name for the operation."""
    if not isinstance(name, str):
        raise TypeError(f"{caller}: name must be a string, got {name!r}; leave it out for none")


def parse_int(caller: Caller, name: str, value: Any) -> int:
    """Read one integer."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{caller}: {name} must be an integer, got {value!r}; write a Python int"
        ) from error


def parse_ints(
    caller: Caller, name: str, value: Any, num_spatial: int, *, minimum: int, scalar: bool = False
) -> Shape:
    """Read one integer for each spatial dimension; with `scalar`, one may stand for all."""
    if scalar:
        with suppress(TypeError):
            value = (operator.index(value),) * num_spatial
    try:
        if isinstance(value, (set, frozenset, Mapping)):
            raise TypeError("no sequence, though it can be iterated over")
        values = tuple(operator.index(number) for number in value)
    except TypeError as error:
        kind = "an integer or a sequence of integers" if scalar else "a sequence of integers"
        example = ", ".join(["1"] * num_spatial) + ("," if num_spatial == 1 else "")
        raise TypeError(
            f"{caller}: {name} must be {kind}, got {value!r}; write ({example}), for example"
        ) from error
    if len(values) != num_spatial:
        raise ValueError(
            f"{caller}: {name} must have one number for each spatial dimension, which are "
            f"{num_spatial}, got {values}; give {num_spatial} of them"
        )
    if any(number < minimum for number in values):
        raise ValueError(
            f"{caller}: {name} must be at least {minimum}, got {values}; raise what is less"
        )
    _check_size(caller, name, values)
    return values


def parse_sizes(caller: Caller, name: str, value: Any, num_spatial: int) -> Shape:
    """Read one size for each spatial dimension, any of which may be symbolic."""
    if not isinstance(value, (tuple, list)) or not any(map(is_symbolic_dim, value)):
        return parse_ints(caller, name, value, num_spatial, minimum=0)
    known = [0 if is_symbolic_dim(size) else size for size in value]
    numbers = parse_ints(caller, name, known, num_spatial, minimum=0)
    sizes: Any = tuple(
        size if is_symbolic_dim(size) else number
        for size, number in zip(value, numbers, strict=True)
    )
    return sizes


@contextmanager
def decided(caller: Caller, *shapes: Shape) -> Iterator[None]:
    """Refuse symbolic shapes of which JAX cannot say what a check or a formula has to know."""
    try:
        yield
    except jax.errors.InconclusiveDimensionOperation as error:
        reason, *_ = str(error).splitlines()
        raise ValueError(
            f"{caller}: symbolic sizes must be such that those of the result follow from them, got "
            f"shapes {' and '.join(map(str, shapes))}, where {reason.rstrip('.')}; give "
            f"constraints to jax.export.symbolic_shape, or write sizes as multiples of the stride"
        ) from error


def _check_size(caller: Caller, name: str, values: Shape) -> None:
    if any(abs(number) > MAX_NUMBER for number in values):
        raise ValueError(
            f"{caller}: {name} must be at most {MAX_NUMBER}, got {values}; lower what is more"
        )


def parse_padding(
    caller: Caller, padding: Any, x_shape: Shape, w_shape: Shape, strides: Shape, dilation: Shape
) -> Pads:
    """Read a padding as `lax` takes it: a name in either case, or pairs that may be negative."""
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
            raise ValueError(
                f"{caller}: padding must be 'SAME', 'SAME_LOWER', 'VALID' or a sequence of "
                f"(low, high) pairs, got {padding!r}; write one of these"
            )
        extents = map(extent, w_shape[2:], dilation)
        return tuple(map(partial(_named, padding.upper()), x_shape[2:], extents, strides))
    try:
        pairs = tuple((operator.index(low), operator.index(high)) for low, high in padding)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{caller}: padding must be a string or a sequence of (low, high) pairs of integers, "
            f"got {padding!r}; write ((p, p), ...) to pad both sides by p"
        ) from error
    if len(pairs) != len(strides):
        raise ValueError(
            f"{caller}: padding must have one pair for each spatial dimension, which are "
            f"{len(strides)}, got {pairs}; give {len(strides)} of them"
        )
    for pair in pairs:
        _check_size(caller, "padding", pair)
    return pairs


def check_named_padding(caller: Caller, padding: Any, lhs_dilation: Shape) -> None:
    """Refuse a padding by name where the input is spread out, as `lax` does."""
    if isinstance(padding, str) and any(b > 1 for b in lhs_dilation):
        raise ValueError(
            f"{caller}: padding must be (low, high) pairs where lhs_dilation is more than 1, got "
            f"{padding!r} and {lhs_dilation}; write the pairs, or call conv_transpose"
        )


def _named(name: str, size: int, extent: int, stride: int) -> tuple[int, int]:
    if name == "VALID":
        return 0, 0
    out = -(-size // stride)
    total = max(0, (out - 1) * stride + extent - size)
    less, more = total // 2, total - total // 2
    return (less, more) if name == "SAME" else (more, less)
