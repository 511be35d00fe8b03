# SPDX-License-Identifier: Apache-2.0
"""cuDNN's three operations under the names of its Python frontend."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax import lax
from jax.export import is_symbolic_dim
from jax.typing import ArrayLike, DTypeLike

from . import _arguments, _array_arguments, _calls, _cudnn_arguments, _numbers, _options, _reference
from ._arguments import Caller
from ._dtypes import Dtypes, accumulator, is_integer, resolve_precision
from ._options import OptionsLike
from ._spec import Role

_FPROP = Caller("conv_fprop", x="image", w="weight", y="response")
_DGRAD = Caller("conv_dgrad", x="image", w="filter", y="loss")
_WGRAD = Caller("conv_wgrad", x="image", w="filter", y="loss")


def conv_fprop(
    image: ArrayLike,
    weight: ArrayLike,
    *,
    padding: int | Sequence[int] | None = None,
    pre_padding: int | Sequence[int] | None = None,
    post_padding: int | Sequence[int] | None = None,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    convolution_mode: Any = "CROSS_CORRELATION",
    compute_data_type: Any = None,
    name: str = "",
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    options: OptionsLike = None,
    image_descale: ArrayLike | None = None,
    weight_descale: ArrayLike | None = None,
) -> jax.Array:
    """Convolve an image with a filter: cuDNN's forward convolution, by its Python frontend's names.

    The number of groups is read off the shapes: C divided by the weight's input channels. Sizes
    and strides are whatever the arrays have; only `dimension_numbers` is not cuDNN's.

    Args:
        image: shape (N, C, *spatial), of any dtype that `conv_general_dilated` takes.
        weight: shape (K, C / groups, *window), of the image's dtype.
        padding: zeros on both sides of each spatial dimension: an integer for all, or one for
            each; none negative. Either this is given, or both of the next two are.
        pre_padding: zeros before each spatial dimension.
        post_padding: zeros after each spatial dimension.
        stride: by how many positions the window advances: an integer for all spatial dimensions,
            or one for each.
        dilation: the distance between the filter's taps, likewise.
        convolution_mode: 'CROSS_CORRELATION', or 'CONVOLUTION' to reverse the window first; a
            string in either case or an enumerator of cuDNN's with that name.
        compute_data_type: None, or what products are summed in, for floating-point numbers
            float32 or its name in cuDNN, FLOAT, unless any are float64.
        name: if not empty, the `jax.named_scope` in which the operation appears in profiles.
        dimension_numbers: None, for channels first in all arrays, as cuDNN counts dimensions; or
            the orders of image, filter and response, as in `conv_general_dilated`.
        precision: as in `conv_general_dilated`.
        preferred_element_type: the response's dtype, as in `conv_general_dilated`; in gradients,
            that of the gradient.
        options: as in `conv_general_dilated`.
        image_descale: None, or a number (an array of one element) with which the sums are
            multiplied before they are rounded to the response's dtype: what one unit of an image
            in 8 bits stands for.
        weight_descale: likewise for the weight.

    Returns:
        The response, of shape (N, K, *out), with out as in `conv_general_dilated`.

    Raises:
        TypeError: if an argument is of the wrong kind, the dtypes differ, or the padding is given
            in no form or in both.
        ValueError: if shapes, channels or geometry do not fit together.
        NotImplementedError: for another `compute_data_type`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcudnn import conv_fprop
        >>> conv_fprop(jnp.ones((8, 3, 32, 32)), jnp.ones((16, 3, 3, 3)), padding=1, stride=2).shape
        (8, 16, 16, 16)
    """
    return _cudnn(
        _FPROP,
        {"x": image, "w": weight},
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        options=options,
        descales={"image_descale": image_descale, "weight_descale": weight_descale},
        name=name,
        padding=padding,
        pre_padding=pre_padding,
        post_padding=post_padding,
        stride=stride,
        dilation=dilation,
        convolution_mode=convolution_mode,
        compute_data_type=compute_data_type,
    )


def conv_dgrad(  # noqa: D417 (the rest is as for conv_fprop)
    loss: ArrayLike,
    filter: ArrayLike,
    image_spatial_shape: Sequence[int],
    *,
    padding: int | Sequence[int] | None = None,
    pre_padding: int | Sequence[int] | None = None,
    post_padding: int | Sequence[int] | None = None,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    convolution_mode: Any = "CROSS_CORRELATION",
    compute_data_type: Any = None,
    name: str = "",
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    options: OptionsLike = None,
    loss_descale: ArrayLike | None = None,
    filter_descale: ArrayLike | None = None,
) -> jax.Array:
    """Compute the gradient of `conv_fprop` with respect to its image.

    It is also what other libraries call a transposed convolution.

    Args:
        loss: the gradient of the response, of shape (N, K, *out).
        filter: shape (K, C / groups, *window), of the dtype of `loss`.
        image_spatial_shape: the spatial sizes of the image, in the order of the filter's spatial
            dimensions, symbolic ones among them. A stride maps several to the same `out`, so `loss`
            does not determine them.
        groups: the number of groups, which neither array shows.
        dimension_numbers: the orders of image, filter and loss; None for channels first.

    All other arguments are those of `conv_fprop`, and describe the forward convolution.

    Returns:
        The image's gradient, of shape (N, C, *image_spatial_shape) in the order of the image.

    Raises:
        TypeError: as `conv_fprop`.
        ValueError: as `conv_fprop`, and if `loss` does not have the response's shape.
        NotImplementedError: as `conv_fprop`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcudnn import conv_dgrad
        >>> loss, weight = jnp.ones((8, 16, 16, 16)), jnp.ones((16, 3, 3, 3))
        >>> conv_dgrad(loss, weight, (32, 32), padding=1, stride=2).shape
        (8, 3, 32, 32)
    """
    return _cudnn(
        _DGRAD,
        {"y": loss, "w": filter},
        spatial_shape=image_spatial_shape,
        groups=groups,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        options=options,
        descales={"loss_descale": loss_descale, "filter_descale": filter_descale},
        name=name,
        padding=padding,
        pre_padding=pre_padding,
        post_padding=post_padding,
        stride=stride,
        dilation=dilation,
        convolution_mode=convolution_mode,
        compute_data_type=compute_data_type,
    )


def conv_wgrad(  # noqa: D417 (the rest is as for conv_fprop)
    image: ArrayLike,
    loss: ArrayLike,
    filter_spatial_shape: Sequence[int],
    *,
    padding: int | Sequence[int] | None = None,
    pre_padding: int | Sequence[int] | None = None,
    post_padding: int | Sequence[int] | None = None,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    convolution_mode: Any = "CROSS_CORRELATION",
    compute_data_type: Any = None,
    name: str = "",
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    options: OptionsLike = None,
    image_descale: ArrayLike | None = None,
    loss_descale: ArrayLike | None = None,
) -> jax.Array:
    """Compute the gradient of `conv_fprop` with respect to its weight.

    Args:
        image: shape (N, C, *spatial).
        loss: the gradient of the response, of shape (N, K, *out) and the image's dtype.
        filter_spatial_shape: the window's sizes, which a stride leaves undetermined.
        groups: the number of groups, which neither array shows.
        dimension_numbers: the orders of image, filter and loss; None for channels first.

    All other arguments are those of `conv_fprop`, and describe the forward convolution.

    Returns:
        The weight's gradient, of shape (K, C / groups, *filter_spatial_shape) in the order of the
        filter.

    Raises:
        TypeError: as `conv_fprop`.
        ValueError: as `conv_fprop`, and if `loss` does not have the response's shape.
        NotImplementedError: as `conv_fprop`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxcudnn import conv_wgrad
        >>> image, loss = jnp.ones((8, 3, 32, 32)), jnp.ones((8, 16, 16, 16))
        >>> conv_wgrad(image, loss, (3, 3), padding=1, stride=2).shape
        (16, 3, 3, 3)
    """
    return _cudnn(
        _WGRAD,
        {"x": image, "y": loss},
        spatial_shape=filter_spatial_shape,
        groups=groups,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        options=options,
        descales={"image_descale": image_descale, "loss_descale": loss_descale},
        name=name,
        padding=padding,
        pre_padding=pre_padding,
        post_padding=post_padding,
        stride=stride,
        dilation=dilation,
        convolution_mode=convolution_mode,
        compute_data_type=compute_data_type,
    )


def _cudnn(
    caller: Caller,
    operands: Mapping[Role, ArrayLike],
    *,
    spatial_shape: Sequence[int] | None = None,
    groups: int | None = None,
    dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
    options: OptionsLike,
    descales: Mapping[str, ArrayLike | None],
    name: str,
    **geometry: Any,
) -> jax.Array:
    """Compute the role that `operands` leaves out; unless it is y, the caller says how large."""
    arrays = _calls.as_arrays(caller, operands)
    num_spatial, dtype = _array_arguments.check_operands(caller, arrays)
    layout = _arguments.parse_layout(caller, dimension_numbers, num_spatial)
    shapes = {role: layout.to_logical(role, a.shape) for role, a in arrays.items()}
    x_shape, w_shape, groups = _arguments.complete_shapes(caller, shapes, spatial_shape, groups)
    wanted = _array_arguments.parse_result_dtype(caller, dtype, preferred_element_type)
    scale = _cudnn_arguments.parse_descales(caller, descales, wanted)
    # What is still to be multiplied by a scale is not rounded before.
    sums = accumulator(dtype, dtype, "int32" if is_integer(dtype) else wanted)
    computed = wanted if scale is None else sums
    (result,) = {"x", "w", "y"} - set(arrays)
    geometry = _cudnn_arguments.parse_geometry(caller, num_spatial, sums=sums, **geometry)
    with _arguments.decided(caller, x_shape, w_shape, *shapes.values()):
        spec = _arguments.make_spec(
            caller,
            x_shape,
            w_shape,
            groups,
            dtypes=Dtypes(dtype, dtype, dtype)._replace(**{result: computed}),
            precision=resolve_precision(caller, precision),
            options=_options.resolve(caller, options),
            **geometry,
        )
        if "y" in shapes:
            _arguments.check_loss_shape(caller, spec, layout, shapes["y"])
        if any(map(is_symbolic_dim, (*spec.x_shape, *spec.w_shape))):
            # Or else it is lowering that finds what the formula cannot know, and names no function.
            _reference.check_shapes(result, spec, layout)
    _arguments.check_name(caller, name)
    with jax.named_scope(name) if name else nullcontext():
        computed = _numbers.compute(arrays, spec=spec, layout=layout)
        return computed if scale is None else (computed.astype(scale.dtype) * scale).astype(wanted)
