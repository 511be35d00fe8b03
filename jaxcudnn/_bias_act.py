# SPDX-License-Identifier: Apache-2.0
"""Convolutions with bias, residual and activation: the public functions."""

from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _calls, _variants
from ._arguments import Caller
from ._epilogue_arguments import Asked
from ._options import OptionsLike

_CONV = Caller(
    "conv_bias_act",
    x="x",
    w="w",
    y="output",
    strides="window_strides",
    dilation="rhs_dilation",
    groups="feature_group_count",
)
_TRANSPOSE = _variants.TRANSPOSE._replace(function="conv_transpose_bias_act", x="x", w="w")


def conv_bias_act(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = "relu",
    *,
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    options: OptionsLike = None,
) -> jax.Array:
    """Compute act(conv(x, w) + residual + bias), on CUDA by one call of cuDNN where it has one.

    The sum and the activation are computed in the dtype in which products are summed, float32, or
    float64 for float64, and rounded once. Where cuDNN computes the convolution alone, its result is
    rounded before, too. It is differentiable to any order in both modes, and can be mapped over any
    axes. For the backward pass it keeps its operands and, for activations whose derivative is
    computed from their output, the output; for gelu, gelu_tanh and silu the sum, rounded.

    Args:
        x: the input, as `lhs` of `conv_general_dilated`.
        w: the filter, as `rhs` of `conv_general_dilated`.
        bias: None, or what is added to each channel of the result, of shape (K,) and the dtype of
            the result.
        residual: None, or what is added to the result, of its shape, in its order of dimensions,
            and of its dtype. Neither is broadcast.
        activation: None; or 'relu', 'relu6', 'leaky_relu' (slope 0.01), 'gelu' (exact),
            'gelu_tanh', 'silu', 'elu', 'softplus', 'tanh' or 'sigmoid', as `jax.nn` defines them
            (https://docs.jax.dev/en/latest/jax.nn.html), for floating-point results, and 'relu' for
            integers; or a function, which is applied to the rounded sum.
        window_strides: by how many positions the window advances, for each spatial dimension; None
            for 1.
        padding: as in `conv_general_dilated`.
        lhs_dilation: as in `conv_general_dilated`. A convolution with it is a transposed one.
        rhs_dilation: as in `conv_general_dilated`.
        dimension_numbers: as in `conv_general_dilated`.
        feature_group_count: as in `conv_general_dilated`.
        batch_group_count: as in `conv_general_dilated`.
        precision: as in `conv_general_dilated`.
        preferred_element_type: as in `conv_general_dilated`.
        options: as in `conv_general_dilated`.

    Returns:
        An array of shape (N / batch_group_count, K, *out), in the order that `dimension_numbers`
        gives, with out as in `conv_general_dilated`.

    Raises:
        TypeError: if an argument is of the wrong kind, or the dtypes differ.
        ValueError: if shapes, channels, groups or geometry do not fit together, or no activation
            has the name.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxcudnn
        >>> x, w, b = jnp.ones((8, 32, 32, 16)), jnp.ones((16, 3, 3, 16)), jnp.ones(16)
        >>> nhwc = ("NHWC", "OHWI", "NHWC")
        >>> jaxcudnn.conv_bias_act(x, w, b, x, padding="SAME", dimension_numbers=nhwc).shape
        (8, 32, 32, 16)
    """
    return _calls.general(
        _CONV,
        x,
        w,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
        options=options,
        asked=Asked(bias, residual, activation),
        default_stride=1,
    )


def conv_transpose_bias_act(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = "relu",
    *,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    transpose_kernel: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    use_consistent_padding: bool = False,
    options: OptionsLike = None,
) -> jax.Array:
    """Compute act(conv_transpose(x, w) + residual + bias), as `conv_bias_act` does.

    Args:
        x: the input, as `lhs` of `conv_transpose`.
        w: the filter, as `rhs` of `conv_transpose`.
        bias: as in `conv_bias_act`.
        residual: as in `conv_bias_act`.
        activation: as in `conv_bias_act`.
        strides: as in `conv_transpose`.
        padding: as in `conv_transpose`.
        rhs_dilation: as in `conv_transpose`.
        dimension_numbers: as in `conv_transpose`: None stands for channels last.
        transpose_kernel: as in `conv_transpose`.
        precision: as in `conv_general_dilated`.
        preferred_element_type: as in `conv_general_dilated`.
        use_consistent_padding: as in `conv_transpose`.
        options: as in `conv_general_dilated`.

    Returns:
        An array of the shape of the result of `conv_transpose`.

    Raises:
        TypeError: as `conv_bias_act`.
        ValueError: as `conv_bias_act`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxcudnn
        >>> x, w, b = jnp.ones((8, 16, 16, 32)), jnp.ones((3, 3, 32, 16)), jnp.ones(16)
        >>> jaxcudnn.conv_transpose_bias_act(x, w, b, strides=(2, 2), padding="SAME").shape
        (8, 32, 32, 16)
    """
    return _variants.transposed(
        _TRANSPOSE,
        x,
        w,
        strides,
        padding,
        rhs_dilation,
        dimension_numbers,
        transpose_kernel,
        precision,
        preferred_element_type,
        use_consistent_padding,
        options,
        Asked(bias, residual, activation),
    )
