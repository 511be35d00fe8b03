# SPDX-License-Identifier: Apache-2.0
"""`lax`'s convolution: its arguments in, one call for `_readings` out."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _calls
from ._arguments import Caller
from ._options import OptionsLike

_LAX = Caller(
    "conv_general_dilated",
    x="lhs",
    w="rhs",
    y="output",
    strides="window_strides",
    dilation="rhs_dilation",
    groups="feature_group_count",
)


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    options: OptionsLike = None,
) -> jax.Array:
    """Convolve `lhs` with `rhs`: `jax.lax.conv_general_dilated`, computed by cuDNN on CUDA devices.

    Parameters, their order and their defaults are those of `lax`, and so is the result. It is
    differentiable to any order in both modes, and can be mapped over any axes with `jax.vmap`.

    Args:
        lhs: the input, of shape (N, C, *spatial) in the order that `dimension_numbers` gives, of
            any number of spatial dimensions and any dtype of numbers or truth values. Products of
            floating-point numbers are summed in float32, or in float64 if that is the dtype of
            operands or result.
        rhs: the filter, of shape (K, C / feature_group_count, *window) in the order that
            `dimension_numbers` gives, and of the dtype of `lhs`.
        window_strides: by how many positions the window advances, for each spatial dimension.
        padding: 'VALID' (none), 'SAME' or 'SAME_LOWER' (as much as makes the output ceil(size /
            stride), the odd one at the end or at the start), in either case and where nothing is
            spread; or a (low, high) pair for each spatial dimension. A negative number crops.
        lhs_dilation: the distance to which elements of `lhs` are spread, with zeros between them,
            for each spatial dimension; None for 1.
        rhs_dilation: the distance between the filter's taps for each spatial dimension; None for 1.
        dimension_numbers: None, for channels first in all three arrays; or three strings for
            `lhs`, `rhs` and the result, such as ('NHWC', 'OHWI', 'NHWC'); or
            `jax.lax.ConvDimensionNumbers`. NHWC with OHWI is what cuDNN takes without a copy.
        feature_group_count: into how many groups the channels of input and output are divided;
            C for a depthwise convolution.
        batch_group_count: into how many groups the images of `lhs` and the output channels are
            divided; the groups' images become one another's. At most one of the two counts may be
            more than 1.
        precision: None, for `jax_default_matmul_precision`; or a `jax.lax.Precision`, its name, or
            a pair of either. float32 operands may be rounded to TF32 unless one of the two says
            HIGHEST, as under `lax`.
        preferred_element_type: the dtype of the result; None for that of the operands. Of their
            kind, or floating-point for integers, and not narrower. Gradients keep the dtype of
            what they are gradients of.
        out_sharding: None; or, under explicit sharding, that of the result, as in `lax`. None
            divides it as the operands are.
        options: None for the options in force, or `jaxcudnn.Options`, or a dict of those that
            differ: how cuDNN's plan is chosen, for the call's derivatives, too.

    Returns:
        An array of shape (N / batch_group_count, K, *out), in the order that `dimension_numbers`
        gives, of dtype `preferred_element_type`, with

            out = max(0, floor((extent(size, lhs_dilation) + low + high
                                - extent(window, rhs_dilation)) / stride) + 1)

        and extent(n, d) = d * (n - 1) + 1, or 0 if n is 0
        (https://openxla.org/xla/operation_semantics#conv_convolution). A sum over nothing is 0.

    Raises:
        TypeError: if an argument is of the wrong kind, or the dtypes differ.
        ValueError: if shapes, channels, groups or geometry do not fit together, or one explicit
            mesh axis divides both operands by different dimensions.

    Differs from `lax` in that a window of size 0 gives zeros, where XLA refuses it. Operands of
    symbolic sizes other than N are left to `lax`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcudnn import conv_general_dilated
        >>> x, w = jnp.ones((8, 32, 32, 3)), jnp.ones((16, 3, 3, 3))
        >>> conv_general_dilated(
        ...     x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")
        ... ).shape
        (8, 16, 16, 16)
    """
    return _calls.general(
        _LAX,
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
        out_sharding,
        options,
    )
