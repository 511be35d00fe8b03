# SPDX-License-Identifier: Apache-2.0
"""Reading the arguments of `torch.convolution`, refused where PyTorch refuses them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._arguments import Caller, parse_int, parse_ints
from ._array_arguments import check_is_array
from ._spec import Pads, Shape, extent


def parse_numbers(
    caller: Caller, name: str, value: Any, num_spatial: int, *, minimum: int
) -> Shape:
    """Read one integer for all spatial dimensions, by itself or as a sequence, or one for each."""
    if hasattr(value, "__len__") and len(value) == 1:
        (value,) = value
    return parse_ints(caller, name, value, num_spatial, minimum=minimum, scalar=True)


def parse_transposed(caller: Caller, transposed: Any) -> bool:
    """Read a truth value, which no array of unknown value has, nor one of several."""
    if isinstance(transposed, (Tracer, str)) or np.ndim(transposed):
        raise TypeError(
            f"{caller}: transposed must be a bool, got {transposed}; write True or False"
        )
    return bool(transposed)


def parse_groups(caller: Caller, value: Any) -> int:
    """Read a number of groups."""
    groups = parse_int(caller, caller.groups, value)
    if groups < 1:
        raise ValueError(f"{caller}: {caller.groups} must be at least 1, got {groups}; write 1")
    return groups


def parse_torch_padding(
    caller: Caller, padding: Any, window: Shape, stride: Shape, dilation: Shape
) -> Pads:
    """Read the padding of a convolution that is not transposed into (low, high) pairs."""
    if not isinstance(padding, str):
        numbers = parse_numbers(caller, "padding", padding, len(window), minimum=0)
        return tuple((number, number) for number in numbers)
    if padding == "valid":
        return ((0, 0),) * len(window)
    if padding != "same":
        raise ValueError(
            f"{caller}: padding must be 'same', 'valid', an integer or a sequence of integers, got "
            f"{padding!r}; write one of these"
        )
    if any(number > 1 for number in stride):
        raise ValueError(
            f"{caller}: padding must be numbers where stride is more than 1, got 'same' and stride "
            f"{stride}; write the numbers"
        )
    totals = (extent(size, d) - 1 for size, d in zip(window, dilation, strict=True))
    return tuple((total // 2, total - total // 2) for total in totals)


def check_sizes(caller: Caller, a: Shape, window: Shape) -> None:
    """Refuse arrays without any position."""
    for name, sizes in ((caller.x, a), (caller.w, window)):
        if 0 in sizes:
            raise ValueError(
                f"{caller}: {name} must have at least one position in each spatial dimension, got "
                f"spatial sizes {sizes}; give it some"
            )


def check_window_fits(
    caller: Caller, sizes: Shape, window: Shape, pads: Pads, dilation: Shape
) -> None:
    """Check that there is an output, if that is known."""
    if not all(isinstance(size, int) for size in (*sizes, *window)):
        return
    padded = tuple(size + low + high for size, (low, high) in zip(sizes, pads, strict=True))
    extents = tuple(map(extent, window, dilation))
    if any(e > size for e, size in zip(extents, padded, strict=True)):
        raise ValueError(
            f"{caller}: the window of {caller.w} must span no more than {caller.x} does with its "
            f"padding, got {extents} and {padded}; pad by more"
        )


def transposed_sizes(
    caller: Caller,
    sizes: Shape,
    window: Shape,
    *,
    stride: Shape,
    padding: Any,
    dilation: Shape,
    output_padding: Shape,
) -> tuple[Shape, Shape]:
    """Give the spatial sizes of a transposed convolution's output, and its padding."""
    if isinstance(padding, str):
        raise TypeError(
            f"{caller}: padding must be an integer or a sequence of integers if transposed, got "
            f"{padding!r}; write the numbers"
        )
    padding = parse_numbers(caller, "padding", padding, len(sizes), minimum=0)
    numbers = tuple(zip(output_padding, stride, dilation, strict=True))
    if any(extra >= max(s, d) for extra, s, d in numbers):
        raise ValueError(
            f"{caller}: output_padding must be less than stride or less than dilation, got "
            f"{output_padding} for {stride} and {dilation}; lower what is more"
        )
    out = tuple(
        s * (size - 1) + extent(k, d) + extra - 2 * p
        for size, k, p, (extra, s, d) in zip(sizes, window, padding, numbers, strict=True)
    )
    if any(size < 1 for size in out):
        raise ValueError(
            f"{caller}: padding must leave something of the output, got padding {padding} for "
            f"output sizes {out}; pad by less"
        )
    return out, padding


def check_transposed_channels(caller: Caller, channels: int, inputs: int, groups: int) -> None:
    """Check the channels of a transposed convolution's input against its filter and groups."""
    if channels % groups:
        raise ValueError(
            f"{caller}: {caller.groups} must divide the channels of {caller.x}, got "
            f"{caller.groups} {groups} for {channels}; choose a divisor"
        )
    if channels != inputs:
        raise ValueError(
            f"{caller}: the {caller.inputs} of {caller.w} must number the channels of {caller.x}, "
            f"got {inputs} for {channels}; {caller.order}"
        )


def parse_bias(caller: Caller, bias: Any, dtype: str, channels: int) -> jax.Array:
    """Read a bias for an output of so many channels."""
    check_is_array(caller, "bias", bias)
    bias = jnp.asarray(bias)
    if bias.shape != (channels,):
        raise ValueError(
            f"{caller}: bias must have the shape (C_out,), that is ({channels},), got "
            f"{bias.shape}; reshape it, or check {caller.w} and {caller.groups}"
        )
    if bias.dtype != dtype:
        raise TypeError(
            f"{caller}: bias must have the dtype of {caller.x} and {caller.w}, {dtype}, got "
            f"{bias.dtype}; cast one of them"
        )
    return bias
