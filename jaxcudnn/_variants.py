# SPDX-License-Identifier: Apache-2.0
"""The other three convolutions of `jax.lax`, each one call of `conv_general_dilated`."""

from collections.abc import Sequence

import jax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _calls
from ._arguments import Caller
from ._epilogue_arguments import Asked
from ._options import OptionsLike
from ._spec import Layout
from ._transposed_padding import parse_transposed_padding

_CHANNELS_FIRST = "put the channels of both second, or call conv_general_dilated"
_CONV = Caller(
    "conv", x="lhs", w="rhs", y="output", strides="window_strides", groups="", order=_CHANNELS_FIRST
)
_GENERAL_PADDING = _CONV._replace(function="conv_with_general_padding", dilation="rhs_dilation")
TRANSPOSE = Caller(
    "conv_transpose",
    x="lhs",
    w="rhs",
    y="output",
    strides="strides",
    dilation="rhs_dilation",
    groups="",
    order="check that dimension_numbers, which put channels last by default, are those of these "
    "arrays, and whether transpose_kernel is meant",
)


def conv(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    options: OptionsLike = None,
) -> jax.Array:
    """Convolve `lhs` with `rhs`, channels first: `jax.lax.conv`, computed by cuDNN on CUDA devices.

    Args:
        lhs: the input, of shape (N, C, *spatial), as in `conv_general_dilated`.
        rhs: the filter, of shape (K, C, *window) and of the dtype of `lhs`.
        window_strides: by how many positions the window advances, for each spatial dimension.
        padding: 'VALID', 'SAME' or 'SAME_LOWER', or pairs, as in `conv_general_dilated`.
        precision: as in `conv_general_dilated`.
        preferred_element_type: as in `conv_general_dilated`.
        options: as in `conv_general_dilated`.

    Returns:
        An array of shape (N, K, *out), with out as in `conv_general_dilated`.

    Raises:
        TypeError: as `conv_general_dilated`.
        ValueError: as `conv_general_dilated`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxcudnn
        >>> x, w = jnp.ones((8, 3, 32, 32)), jnp.ones((16, 3, 3, 3))
        >>> jaxcudnn.conv(x, w, (2, 2), "SAME").shape
        (8, 16, 16, 16)
    """
    return _calls.general(
        _CONV,
        lhs,
        rhs,
        window_strides,
        padding,
        precision=precision,
        preferred_element_type=preferred_element_type,
        options=options,
    )


def conv_with_general_padding(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    options: OptionsLike = None,
) -> jax.Array:
    """Convolve `lhs` with `rhs`, channels first and dilated: `jax.lax.conv_with_general_padding`.

    Args:
        lhs: the input, of shape (N, C, *spatial), as in `conv_general_dilated`.
        rhs: the filter, of shape (K, C, *window) and of the dtype of `lhs`.
        window_strides: by how many positions the window advances, for each spatial dimension.
        padding: as in `conv_general_dilated`.
        lhs_dilation: the distance to which elements of `lhs` are spread, for each spatial
            dimension; None for 1.
        rhs_dilation: the distance between the filter's taps, likewise.
        precision: as in `conv_general_dilated`.
        preferred_element_type: as in `conv_general_dilated`.
        options: as in `conv_general_dilated`.

    Returns:
        An array of shape (N, K, *out), with out as in `conv_general_dilated`.

    Raises:
        TypeError: as `conv_general_dilated`.
        ValueError: as `conv_general_dilated`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxcudnn
        >>> x, w = jnp.ones((8, 3, 32, 32)), jnp.ones((16, 3, 3, 3))
        >>> jaxcudnn.conv_with_general_padding(x, w, (1, 1), "VALID", None, (2, 2)).shape
        (8, 16, 28, 28)
    """
    return _calls.general(
        _GENERAL_PADDING,
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        precision=precision,
        preferred_element_type=preferred_element_type,
        options=options,
    )


def conv_transpose(
    lhs: ArrayLike,
    rhs: ArrayLike,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    transpose_kernel: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    use_consistent_padding: bool = False,
    *,
    options: OptionsLike = None,
) -> jax.Array:
    """Convolve `lhs`, spread out by `strides`, with `rhs`: `jax.lax.conv_transpose`.

    It is the input's gradient of a convolution with these strides, and computed as that, on CUDA
    devices by cuDNN. Neither value of `transpose_kernel` copies the filter.

    Args:
        lhs: the input, of shape (N, C, *spatial) in the order that `dimension_numbers` gives, as in
            `conv_general_dilated`.
        rhs: the filter, of shape (K, C, *window) in the order that `dimension_numbers` gives, or
            (C, K, *window) with `transpose_kernel`; of the dtype of `lhs`.
        strides: the distance to which elements of `lhs` are spread, for each spatial dimension.
        padding: 'SAME', for an output as large as `strides` times the input; 'VALID', which adds
            to that by how much the window spans more than the stride; or a (low, high) pair for
            each spatial dimension, by which the spread input is padded or, if negative, cropped.
            As in `lax`, the names in other spellings, and 'SAME_LOWER', are taken where all strides
            are 1, and mean there what they mean in `conv_general_dilated`.
        rhs_dilation: the distance between the filter's taps for each spatial dimension; None for 1.
        dimension_numbers: as in `conv_general_dilated`, except that None stands for channels last:
            ('NHC', 'HIO', 'NHC'), ('NHWC', 'HWIO', 'NHWC') or ('NHWDC', 'HWDIO', 'NHWDC').
        transpose_kernel: reverse the window, and read what `dimension_numbers` calls the filter's
            inputs as its outputs and its outputs as its inputs. `rhs` is then the filter of the
            convolution whose gradient this is, as in Keras and PyTorch.
        precision: as in `conv_general_dilated`.
        preferred_element_type: as in `conv_general_dilated`.
        use_consistent_padding: read pairs, too, as the padding of the convolution whose gradient
            this is, as PyTorch does: (a, b) is then (e - 1 - a, e - 1 - b), where e is how many
            positions the window spans.
        options: as in `conv_general_dilated`.

    Returns:
        An array of shape (N, K, *out), in the order that `dimension_numbers` gives, with
        out = stride * (size - 1) + 1 + low + high - (e - 1).

    Raises:
        TypeError: as `conv_general_dilated`.
        ValueError: as `conv_general_dilated`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxcudnn
        >>> x, w = jnp.ones((8, 16, 16, 32)), jnp.ones((3, 3, 32, 16))
        >>> jaxcudnn.conv_transpose(x, w, (2, 2), "SAME").shape
        (8, 32, 32, 16)
    """
    return transposed(
        TRANSPOSE,
        lhs,
        rhs,
        strides,
        padding,
        rhs_dilation,
        dimension_numbers,
        transpose_kernel,
        precision,
        preferred_element_type,
        use_consistent_padding,
        options,
    )


def transposed(
    caller: Caller,
    lhs: ArrayLike,
    rhs: ArrayLike,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers,
    transpose_kernel: bool,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
    use_consistent_padding: bool,
    options: OptionsLike,
    asked: Asked = Asked(),  # noqa: B008 (it is immutable)
) -> jax.Array:
    """Compute what `conv_transpose` does, in the name of a caller, perhaps with an epilogue."""
    operands = _calls.read_operands(
        caller,
        lhs,
        rhs,
        dimension_numbers,
        preferred_element_type=preferred_element_type,
        options=options,
    )
    if dimension_numbers is None:
        operands = operands._replace(layout=_channels_last(caller, operands.num_spatial))
    if operands.is_for_lax:
        y = lax.conv_transpose(
            operands.lhs, operands.rhs, strides, padding, rhs_dilation,
            lax.ConvDimensionNumbers(*operands.layout), transpose_kernel, precision,
            preferred_element_type, use_consistent_padding,
        )  # fmt: skip
        return _calls.finish(caller, operands, y, asked)
    if transpose_kernel:
        o, i, *window = operands.layout.w
        operands = operands._replace(layout=operands.layout._replace(w=(i, o, *window)))
        caller = caller._replace(inputs="output channels")
    spread = operands.read(caller, caller.strides, strides)
    dilation = operands.read(caller, caller.dilation, rhs_dilation, default=1)
    return _calls.convolve(
        caller,
        operands,
        strides=(1,) * operands.num_spatial,
        padding=parse_transposed_padding(
            caller,
            padding,
            operands.lhs_shape,
            operands.rhs_shape,
            spread,
            dilation,
            consistent=use_consistent_padding,
        ),
        lhs_dilation=spread,
        rhs_dilation=dilation,
        precision=precision,
        flip=bool(transpose_kernel),
        asked=asked,
    )


def _channels_last(caller: Caller, num_spatial: int) -> Layout:
    """Give the layout of N*C, *IO and N*C."""
    if num_spatial > 3:
        raise ValueError(
            f"{caller}: dimension_numbers must be given where there are more than three "
            f"spatial dimensions, got None for {num_spatial}; write three strings of "
            f"{num_spatial + 2} letters"
        )
    image = (0, num_spatial + 1, *range(1, num_spatial + 1))
    return Layout(x=image, w=(num_spatial + 1, num_spatial, *range(num_spatial)), y=image)
