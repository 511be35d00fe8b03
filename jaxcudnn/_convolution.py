# SPDX-License-Identifier: Apache-2.0
"""Convolutions and transposed ones in the words of PyTorch."""

from collections.abc import Sequence

import jax
from jax import lax
from jax.typing import ArrayLike

from . import _calls, _readings, _torch_arguments
from ._arguments import Caller
from ._calls import Operands
from ._dtypes import Dtypes, accumulator, is_complex, resolve_precision
from ._options import OptionsLike
from ._spec import ConvSpec, Shape

_TORCH = Caller(
    "convolution",
    x="a",
    w="weight",
    y="output",
    order="check groups and that weight is (C_out, C_in / groups, *window)",
)
_TORCH_TRANSPOSED = _TORCH._replace(
    order="check that weight is (C_in, C_out / groups, *window), as transposed convolutions have it"
)


def convolution(
    a: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    transposed: bool,
    output_padding: int | Sequence[int],
    groups: int,
    *,
    precision: lax.PrecisionLike = None,
    options: OptionsLike = None,
) -> jax.Array:
    """Convolve `a` with `weight`, or compute the gradient of that: `torch.convolution`.

    Also `torch.ops.aten.convolution` and `thunder.clang.convolution`, whose arguments these are,
    computed by cuDNN on CUDA devices. A transposed convolution is the input's gradient of a
    convolution with the same weight, and nothing is copied for it. Numbers may be one integer for
    all spatial dimensions, by itself or as a sequence, or a sequence of one for each.

    Args:
        a: the input, of shape (N, C_in, *spatial), of any dtype that `conv_general_dilated` takes.
        weight: the filter, of shape (C_out, C_in / groups, *window), or if transposed
            (C_in, C_out / groups, *window); of the dtype of `a`.
        bias: None, or what is added to each output channel, of shape (C_out,) and that dtype.
        stride: by how many positions the window advances; if transposed, the distance to which
            elements of `a` are spread.
        padding: zeros on both sides of each spatial dimension, none negative; if transposed, how
            much is cut off both sides of the output. Unless transposed also 'valid', for none, and
            with a stride of 1 'same', for an output of the size of `a`, the odd zero at the end.
        dilation: the distance between the filter's taps.
        transposed: whether to compute the gradient.
        output_padding: by how much a transposed output is longer at the end, for which there are
            several possibilities if the stride is more than 1; less than stride or less than
            dilation. Of no effect unless transposed.
        groups: into how many groups the channels of input and output are divided.
        precision: as in `conv_general_dilated`.
        options: as in `conv_general_dilated`.

    Returns:
        An array of shape (N, C_out, *out) and the operands' dtype, with e = dilation * (window - 1)
        + 1 and out = floor((size + 2 * padding - e) / stride) + 1, or if transposed
        out = stride * (size - 1) - 2 * padding + e + output_padding
        (https://docs.pytorch.org/docs/stable/generated/torch.nn.ConvTranspose2d.html).

    Raises:
        TypeError: if an argument is of the wrong kind, or the dtypes differ.
        ValueError: if shapes, channels, groups or geometry do not fit together, or nothing is left
            of a spatial dimension.

    Differs from PyTorch in that a bias of another dtype is refused, and that a sum over no channels
    is 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcudnn import convolution
        >>> x, w, b = jnp.ones((8, 3, 32, 32)), jnp.ones((16, 3, 3, 3)), jnp.ones(16)
        >>> y = convolution(x, w, b, 2, 1, 1, False, 0, 1)
        >>> y.shape, convolution(y, w, None, 2, 1, 1, True, 1, 1).shape
        ((8, 16, 16, 16), (8, 3, 32, 32))
    """
    transposed = _torch_arguments.parse_transposed(_TORCH, transposed)
    caller = _TORCH_TRANSPOSED if transposed else _TORCH
    operands = _calls.read_operands(caller, a, weight, options=options)

    def numbers(name: str, value: int | Sequence[int], minimum: int) -> Shape:
        return _torch_arguments.parse_numbers(
            caller, name, value, operands.num_spatial, minimum=minimum
        )

    strides, dilations = numbers("stride", stride, 1), numbers("dilation", dilation, 1)
    extra = numbers("output_padding", output_padding, 0)
    groups = _torch_arguments.parse_groups(caller, groups)
    if bias is not None:
        channels = operands.rhs_shape[1] * groups if transposed else operands.rhs_shape[0]
        bias = _torch_arguments.parse_bias(caller, bias, operands.dtype, channels)
    _torch_arguments.check_sizes(caller, operands.lhs_shape[2:], operands.rhs_shape[2:])
    if transposed:
        y = _transposed(
            caller, operands, strides, padding, dilations, extra, groups, precision=precision
        )
    else:
        pads = _torch_arguments.parse_torch_padding(
            caller, padding, operands.rhs_shape[2:], strides, dilations
        )
        _torch_arguments.check_window_fits(
            caller, operands.lhs_shape[2:], operands.rhs_shape[2:], pads, dilations
        )
        y = _calls.convolve(
            caller,
            operands,
            strides=strides,
            padding=pads,
            lhs_dilation=(1,) * operands.num_spatial,
            rhs_dilation=dilations,
            feature_groups=groups,
            precision=precision,
        )
    return y if bias is None else y + _per_channel(bias, y)


def _per_channel(bias: jax.Array, y: jax.Array) -> jax.Array:
    """Spread a bias over y, in the dtype in which its gradient is then summed over y."""
    dtype = y.dtype.name
    if not is_complex(dtype):
        bias = lax.convert_element_type(bias, accumulator(dtype, dtype, dtype))
    return lax.convert_element_type(lax.broadcast_in_dim(bias, y.shape, (1,)), y.dtype)


def _transposed(
    caller: Caller,
    operands: Operands,
    stride: Shape,
    padding: int | Sequence[int] | str,
    dilation: Shape,
    output_padding: Shape,
    groups: int,
    *,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Compute dx of the convolution from the output to `a`, whose filter the weight is."""
    (n, channels, *sizes), (inputs, outputs, *window) = operands.lhs_shape, operands.rhs_shape
    _torch_arguments.check_transposed_channels(caller, channels, inputs, groups)
    out, pads = _torch_arguments.transposed_sizes(
        caller,
        tuple(sizes),
        tuple(window),
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=output_padding,
    )
    spec = ConvSpec(
        x_shape=(n, outputs * groups, *out),
        w_shape=operands.rhs_shape,
        strides=stride,
        padding=tuple(
            (p, _readings.high_padding(p - extra, s, p))
            for p, extra, s in zip(pads, output_padding, stride, strict=True)
        ),
        dilation=dilation,
        groups=groups,
        flip=False,
        dtypes=Dtypes(operands.dtype, operands.dtype, operands.dtype),
        precision=resolve_precision(caller, precision),
        options=operands.options,
    )
    return _readings.compute_cropped({"y": operands.lhs, "w": operands.rhs}, spec, operands.layout)
