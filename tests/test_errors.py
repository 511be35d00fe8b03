# SPDX-License-Identifier: Apache-2.0
"""Every refusal: the exception, and a text that names the function, the rule, the values and the remedy."""

# ruff: noqa: E501 (a refusal is a line)

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcudnn

PADDED: dict[str, Any] = {"padding": 1}


# Of NumPy, since JAX's own would start it on the CPU before a session can choose the GPU.
def ones(*shape: int, dtype="float32"):
    return np.ones(shape, jnp.dtype(dtype))


X, W, Y = ones(2, 4, 6, 6), ones(6, 4, 3, 3), ones(2, 6, 6, 6)
B = ones(6)
LAST, HWIO = ones(2, 6, 6, 4), ones(3, 3, 4, 6)


def general(
    lhs: Any = X,
    rhs: Any = W,
    window_strides: Any = (1, 1),
    padding: Any = "SAME",
    **arguments: Any,
):
    return jaxcudnn.conv_general_dilated(lhs, rhs, window_strides, padding, **arguments)


def fprop(image: Any = X, weight: Any = W, **arguments: Any):
    return jaxcudnn.conv_fprop(image, weight, **PADDED | arguments)


def dgrad(loss: Any = Y, filter: Any = W, image_spatial_shape: Any = (6, 6), **arguments: Any):
    return jaxcudnn.conv_dgrad(loss, filter, image_spatial_shape, **PADDED | arguments)


def wgrad(image: Any = X, loss: Any = Y, filter_spatial_shape: Any = (3, 3), **arguments: Any):
    return jaxcudnn.conv_wgrad(image, loss, filter_spatial_shape, **PADDED | arguments)


def conv(lhs: Any = X, rhs: Any = W, window_strides: Any = (1, 1), padding: Any = "SAME"):
    return jaxcudnn.conv(lhs, rhs, window_strides, padding)


def dilated(
    lhs: Any = X,
    rhs: Any = W,
    window_strides: Any = (1, 1),
    padding: Any = "SAME",
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
):
    return jaxcudnn.conv_with_general_padding(
        lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation
    )


def transpose(
    lhs: Any = LAST, rhs: Any = HWIO, strides: Any = (2, 2), padding: Any = "SAME", **arguments: Any
):
    return jaxcudnn.conv_transpose(lhs, rhs, strides, padding, **arguments)


def convolution(
    a: Any = X,
    weight: Any = W,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    transposed: Any = False,
    output_padding: Any = 0,
    groups: Any = 1,
    **arguments: Any,
):
    return jaxcudnn.convolution(
        a, weight, bias, stride, padding, dilation, transposed, output_padding, groups, **arguments
    )


def up(a: Any = Y, **arguments: Any):
    """A transposed convolution."""
    return convolution(a, **{"transposed": True, "stride": 2} | arguments)


def bias_act(
    x: Any = X, w: Any = W, bias: Any = B, residual: Any = Y, activation: Any = "relu",
    padding: Any = "SAME", **arguments: Any,
):  # fmt: skip
    return jaxcudnn.conv_bias_act(x, w, bias, residual, activation, padding=padding, **arguments)


def up_bias_act(
    x: Any = LAST, w: Any = HWIO, bias: Any = B, residual: Any = None, activation: Any = "relu"
):
    return jaxcudnn.conv_transpose_bias_act(
        x, w, bias, residual, activation, strides=(2, 2), padding="SAME"
    )


NAMES = {
    bias_act: "conv_bias_act",
    up_bias_act: "conv_transpose_bias_act",
    general: "conv_general_dilated",
    conv: "conv",
    dilated: "conv_with_general_padding",
    transpose: "conv_transpose",
    convolution: "convolution",
    up: "convolution",
    fprop: "conv_fprop",
    dgrad: "conv_dgrad",
    wgrad: "conv_wgrad",
}

REFUSED = [
    # operands
    (general, {"lhs": [1.0]}, TypeError, "lhs must be a JAX or NumPy array, got list; convert it with jax.numpy.asarray"),
    (fprop, {"weight": 2.0}, TypeError, "weight must be a JAX or NumPy array, got float; "),
    (general, {"rhs": ones(6, 4, 3)}, ValueError, "lhs and rhs must have the same rank, got shapes (2, 4, 6, 6) and (6, 4, 3)"),
    (fprop, {"image": ones(4, 6, 6)}, ValueError, "image and weight must have the same rank, got shapes (4, 6, 6) and (6, 4, 3, 3)"),
    (general, {"lhs": ones(3), "rhs": ones(3)}, ValueError, "lhs and rhs must have two dimensions beside the spatial ones, got shapes (3,) and (3,)"),
    (general, {"lhs": jax.ShapeDtypeStruct((2, 4, 6, 6), "float32")}, TypeError, "lhs must be a JAX or NumPy array, got a ShapeDtypeStruct; give that to jax.eval_shape"),
    (fprop, {"image": X.astype(object)}, TypeError, "image must hold numbers or truth values, got dtype object; convert it with astype"),
    (general, {"rhs": X.astype(str)}, TypeError, "rhs must hold numbers or truth values, got dtype <U"),
    (general, {"rhs": W.astype("bfloat16")}, TypeError, "lhs and rhs must have the same dtype, got float32 and bfloat16; cast one of them"),
    # channels and groups
    (general, {"rhs": ones(6, 3, 3, 3)}, ValueError, "the input channels of rhs must number the channels of lhs divided by feature_group_count, got 3 for 4 // 1; if dimension_numbers are not the default"),
    (general, {"feature_group_count": 3}, ValueError, "feature_group_count must divide the channels of lhs, got feature_group_count 3 for 4"),
    (general, {"rhs": ones(6, 1, 3, 3), "feature_group_count": 4}, ValueError, "feature_group_count must divide the output channels of rhs, got feature_group_count 4 for 6"),
    (general, {"feature_group_count": 0}, ValueError, "feature_group_count must be at least 1, got 0"),
    (general, {"feature_group_count": 1.0}, TypeError, "feature_group_count must be an integer, got 1.0"),
    (fprop, {"weight": ones(6, 3, 3, 3)}, ValueError, "the channels of image must be a multiple of the input channels of weight, got 4 and 3; if dimension_numbers are not the default"),
    (fprop, {"weight": ones(6, 0, 3, 3)}, ValueError, "must be a multiple of the input channels of weight, got 4 and 0"),
    (fprop, {"weight": ones(5, 2, 3, 3)}, ValueError, "groups must divide the channels of image and the output channels of weight, got groups 2 for 4 and 5"),
    (dgrad, {"groups": 4}, ValueError, "groups must divide the channels of image and the output channels of filter, got groups 4 for 16 and 6"),
    (dgrad, {"groups": -1}, ValueError, "groups must be at least 1, got -1"),
    (wgrad, {"groups": 3}, ValueError, "groups must divide the channels of image and the output channels of filter, got groups 3 for 4 and 6"),
    (wgrad, {"groups": 0}, ValueError, "groups must be at least 1, got 0"),
    (wgrad, {"groups": "2"}, TypeError, "groups must be an integer, got '2'"),
    # strides and dilation
    (general, {"window_strides": 1}, TypeError, "window_strides must be a sequence of integers, got 1"),
    (general, {"window_strides": (1.0, 1.0)}, TypeError, "window_strides must be a sequence of integers, got (1.0, 1.0)"),
    (general, {"window_strides": (1,)}, ValueError, "window_strides must have one number for each spatial dimension, which are 2, got (1,)"),
    (general, {"window_strides": (1, 0)}, ValueError, "window_strides must be at least 1, got (1, 0)"),
    (general, {"window_strides": (1, -2)}, ValueError, "window_strides must be at least 1, got (1, -2)"),
    (general, {"rhs_dilation": (0, 1)}, ValueError, "rhs_dilation must be at least 1, got (0, 1)"),
    (general, {"rhs_dilation": (1, 1, 1)}, ValueError, "rhs_dilation must have one number for each spatial dimension, which are 2, got (1, 1, 1)"),
    (fprop, {"stride": -1}, ValueError, "stride must be at least 1, got (-1, -1)"),
    (fprop, {"stride": "1"}, TypeError, "stride must be an integer or a sequence of integers, got '1'"),
    (fprop, {"dilation": (1, 1, 1)}, ValueError, "dilation must have one number for each spatial dimension, which are 2, got (1, 1, 1)"),
    # padding
    (general, {"padding": "FULL"}, ValueError, "padding must be 'SAME', 'SAME_LOWER', 'VALID' or a sequence of (low, high) pairs, got 'FULL'"),
    (general, {"padding": 1}, TypeError, "padding must be a string or a sequence of (low, high) pairs of integers, got 1; write ((p, p), ...) to pad both sides by p"),
    (general, {"padding": (1, 1)}, TypeError, "pairs of integers, got (1, 1); write ((p, p), ...)"),
    (general, {"padding": ((1, 1), (1, 0.5))}, TypeError, "pairs of integers, got ((1, 1), (1, 0.5))"),
    (general, {"padding": ((1, 1, 1), (1, 1, 1))}, TypeError, "pairs of integers, got ((1, 1, 1), (1, 1, 1))"),
    (general, {"padding": ((1, 1),)}, ValueError, "padding must have one pair for each spatial dimension, which are 2, got ((1, 1),)"),
    (general, {"padding": ((-4, -3), (0, 0))}, ValueError, "negative padding must not crop more than there is, got padding ((-4, -3), (0, 0)) for spatial sizes (6, 6)"),
    (fprop, {"padding": -1}, ValueError, "padding must be at least 0, got (-1, -1)"),
    (fprop, {"padding": ((1, 1), (1, 1))}, TypeError, "padding must be an integer or a sequence of integers, got ((1, 1), (1, 1))"),
    (fprop, {"padding": (1,)}, ValueError, "padding must have one number for each spatial dimension, which are 2, got (1,)"),
    (fprop, {"padding": None}, TypeError, "either padding or both pre_padding and post_padding must be given, got none of them; write padding=0 for none"),
    (fprop, {"pre_padding": 1}, TypeError, "either padding or both pre_padding and post_padding must be given, got padding and pre_padding"),
    (fprop, {"pre_padding": 1, "post_padding": 1}, TypeError, "must be given, got padding and pre_padding and post_padding"),
    (wgrad, {"padding": None, "post_padding": 1}, TypeError, "must be given, got post_padding"),
    (fprop, {"padding": None, "pre_padding": (1, 1), "post_padding": (1, -1)}, ValueError, "post_padding must be at least 0, got (1, -1)"),
    # dimension numbers
    (general, {"dimension_numbers": "NCHW"}, TypeError, "dimension_numbers must be None, three strings or a jax.lax.ConvDimensionNumbers, got 'NCHW'"),
    (general, {"dimension_numbers": ("NCHW", "OIHW")}, TypeError, "dimension_numbers must be None, three strings or a jax.lax.ConvDimensionNumbers, got ('NCHW', 'OIHW')"),
    (general, {"dimension_numbers": ("NCHW", (0, 1, 2, 3), "NCHW")}, TypeError, "dimension_numbers must be None, three strings"),
    (general, {"dimension_numbers": ("NCH", "OIH", "NCH")}, ValueError, "dimension_numbers must name each of 4 axes by a letter of its own, two of them N and C, or O and I for rhs, and the others the same in all three, got ('NCH', 'OIH', 'NCH'); for two spatial dimensions write ('NHWC', 'OHWI', 'NHWC'), for example"),
    (general, {"dimension_numbers": ("NCHH", "OIHH", "NCHH")}, ValueError, "by a letter of its own"),
    (general, {"dimension_numbers": ("NCHW", "OIHX", "NCHW")}, ValueError, "the same in all three, got ('NCHW', 'OIHX', 'NCHW')"),
    (general, {"dimension_numbers": ("NHWX", "OIHW", "NCHW")}, ValueError, "two of them N and C"),
    (fprop, {"dimension_numbers": ("NCHW", "HWXY", "NCHW")}, ValueError, "or O and I for weight"),
    (general, {"dimension_numbers": lax.ConvDimensionNumbers((0, 1, 2), (0, 1, 2), (0, 1, 2))}, ValueError, "dimension_numbers must be three permutations of the axes 0 to 3, got ConvDimensionNumbers("),
    # the third array
    (dgrad, {"image_spatial_shape": (7, 6)}, ValueError, "loss must have the shape of the forward convolution's output, (2, 6, 7, 6), got (2, 6, 6, 6)"),
    (dgrad, {"loss": ones(2, 5, 6, 6)}, ValueError, "loss must have the shape of the forward convolution's output, (2, 6, 6, 6), got (2, 5, 6, 6)"),
    (dgrad, {"image_spatial_shape": 6}, TypeError, "image_spatial_shape must be a sequence of integers, got 6"),
    (dgrad, {"image_spatial_shape": (2, 4, 6, 6)}, ValueError, "image_spatial_shape must have one number for each spatial dimension, which are 2, got (2, 4, 6, 6)"),
    (wgrad, {"filter_spatial_shape": (3, 5)}, ValueError, "loss must have the shape of the forward convolution's output, (2, 6, 6, 4), got (2, 6, 6, 6)"),
    (wgrad, {"loss": ones(3, 6, 6, 6)}, ValueError, "output, (2, 6, 6, 6), got (3, 6, 6, 6); check padding"),
    (wgrad, {"filter_spatial_shape": (3, -1)}, ValueError, "filter_spatial_shape must be at least 0, got (3, -1)"),
    # modes, types and precision
    (fprop, {"convolution_mode": "CORRELATION"}, ValueError, "convolution_mode must be 'CROSS_CORRELATION' or 'CONVOLUTION', got 'CORRELATION'"),
    (fprop, {"convolution_mode": True}, TypeError, "convolution_mode must be a string or an enumerator of cuDNN's, got True"),
    (fprop, {"compute_data_type": "HALF"}, NotImplementedError, "compute_data_type must be float32 for these dtypes, got 'HALF'; leave it out"),
    (fprop, {"compute_data_type": SimpleNamespace(name="DOUBLE")}, NotImplementedError, "compute_data_type must be float32 for these dtypes, got namespace(name='DOUBLE')"),
    (wgrad, {"compute_data_type": jnp.float16}, NotImplementedError, "compute_data_type must be float32 for these dtypes, got "),
    (fprop, {"compute_data_type": 0}, TypeError, "compute_data_type must be a string or an enumerator of cuDNN's, got 0"),
    (general, {"precision": "low"}, ValueError, "precision must be None, a jax.lax.Precision, its name, a pair of these, or a jax.lax.DotAlgorithmPreset, got 'low'"),
    (general, {"precision": ("high", None)}, ValueError, "precision must be None, a jax.lax.Precision, its name, a pair of these"),
    (general, {"precision": ("high",) * 3}, ValueError, "precision must be None"),
    (general, {"precision": 0}, ValueError, "precision must be None"),
    (dgrad, {"precision": ("F32_F32_F32", "F32_F32_F32")}, ValueError, "precision must be None"),
    # what only lax's function has
    (general, {"lhs_dilation": (2, 0)}, ValueError, "lhs_dilation must be at least 1, got (2, 0)"),
    (general, {"lhs_dilation": 2}, TypeError, "lhs_dilation must be a sequence of integers, got 2"),
    (general, {"batch_group_count": 0}, ValueError, "batch_group_count must be at least 1, got 0"),
    (general, {"batch_group_count": 4, "rhs": ones(8, 4, 3, 3)}, ValueError, "batch_group_count must divide the images of lhs, got batch_group_count 4 for 2"),
    (general, {"batch_group_count": 4}, ValueError, "batch_group_count must divide the output channels of rhs, got batch_group_count 4 for 6"),
    (general, {"batch_group_count": 2, "feature_group_count": 2}, ValueError, "at most one of feature_group_count and batch_group_count may be more than 1, got 2 and 2"),
    (general, {"batch_group_count": None}, TypeError, "batch_group_count must be an integer, got None"),
    (general, {"preferred_element_type": "bfloat16"}, TypeError, "preferred_element_type must be of the kind of the operands' dtype, or floating-point for integers, and not narrower, got bfloat16 for float32; convert the result instead"),
    (general, {"preferred_element_type": "int32"}, TypeError, "got int32 for float32"),
    (fprop, {"preferred_element_type": "complex64"}, TypeError, "got complex64 for float32"),
    (general, {"lhs": X.astype("int8"), "rhs": W.astype("int8"), "preferred_element_type": "uint16"}, TypeError, "got uint16 for int8"),
    (general, {"lhs": X.astype("complex64"), "rhs": W.astype("complex64"), "preferred_element_type": "float32"}, TypeError, "got float32 for complex64"),
    (general, {"preferred_element_type": "real"}, TypeError, "preferred_element_type must be a dtype, got 'real'"),
    (general, {"out_sharding": "x"}, TypeError, "out_sharding must be None, a NamedSharding or a PartitionSpec, got 'x'"),
    (general, {"out_sharding": jax.P()}, ValueError, "out_sharding must be a NamedSharding where no mesh is set, got P(); use jax.set_mesh"),
    # scales
    (fprop, {"image": X.astype("int8"), "weight": W.astype("int8"), "image_descale": 0.5}, TypeError, "image_descale must be for a floating-point result, got one of int8; give preferred_element_type"),
    (dgrad, {"loss_descale": "half"}, TypeError, "loss_descale must be a number, got 'half'; leave it out for 1"),
    (wgrad, {"loss_descale": ones(3)}, ValueError, "loss_descale must be a real number for the whole array, got shape (3,) and dtype float32"),
    (wgrad, {"image_descale": 1j}, ValueError, "image_descale must be a real number for the whole array, got shape () and dtype complex64"),
    # sizes and kinds that nothing else would catch by name
    (general, {"window_strides": {1, 2}}, TypeError, "window_strides must be a sequence of integers, got {1, 2}; write (1, 1), for example"),
    (fprop, {"stride": 2**63}, ValueError, f"stride must be at most 2147483647, got ({2**63}, {2**63})"),
    (general, {"padding": ((0, 2**63), (0, 0))}, ValueError, f"padding must be at most 2147483647, got (0, {2**63})"),
    (fprop, {"name": 3}, TypeError, "name must be a string, got 3; leave it out for none"),
    (fprop, {"padding": None, "pre_padding": 1}, TypeError, "got pre_padding; give the other one too"),
    (fprop, {"pre_padding": 1, "post_padding": 1}, TypeError, "got padding and pre_padding and post_padding; leave out padding or the others"),
    # the other functions of lax
    (general, {"lhs_dilation": (1, 2)}, ValueError, "padding must be (low, high) pairs where lhs_dilation is more than 1, got 'SAME' and (1, 2); write the pairs, or call conv_transpose"),
    (general, {"window_strides": None}, TypeError, "window_strides must be a sequence of integers, got None"),
    (conv, {"lhs": [1.0]}, TypeError, "lhs must be a JAX or NumPy array, got list"),
    (conv, {"window_strides": (0, 1)}, ValueError, "window_strides must be at least 1, got (0, 1)"),
    (conv, {"rhs": ones(6, 3, 3, 3)}, ValueError, "the input channels of rhs must number the channels of lhs, got 3 for 4; put the channels of both second, or call conv_general_dilated"),
    (conv, {"padding": "FULL"}, ValueError, "padding must be 'SAME', 'SAME_LOWER', 'VALID' or a sequence of (low, high) pairs, got 'FULL'"),
    (dilated, {"rhs_dilation": (0, 1)}, ValueError, "rhs_dilation must be at least 1, got (0, 1)"),
    (dilated, {"lhs_dilation": (1,)}, ValueError, "lhs_dilation must have one number for each spatial dimension, which are 2, got (1,)"),
    (dilated, {"lhs_dilation": (2, 1)}, ValueError, "padding must be (low, high) pairs where lhs_dilation is more than 1, got 'SAME' and (2, 1)"),
    (dilated, {"rhs": ones(6, 3, 3, 3)}, ValueError, "the input channels of rhs must number the channels of lhs, got 3 for 4; put the channels of both second"),
    (transpose, {"rhs": 2.0}, TypeError, "rhs must be a JAX or NumPy array, got float"),
    (transpose, {"lhs": X}, ValueError, "the input channels of rhs must number the channels of lhs, got 4 for 6; check that dimension_numbers, which put channels last by default, are those of these arrays, and whether transpose_kernel is meant"),
    (transpose, {"transpose_kernel": True}, ValueError, "the output channels of rhs must number the channels of lhs, got 6 for 4; check that dimension_numbers"),
    (transpose, {"strides": 2}, TypeError, "strides must be a sequence of integers, got 2"),
    (transpose, {"strides": (0, 1)}, ValueError, "strides must be at least 1, got (0, 1)"),
    (transpose, {"rhs_dilation": (1,)}, ValueError, "rhs_dilation must have one number for each spatial dimension, which are 2, got (1,)"),
    (transpose, {"padding": "same"}, ValueError, "padding must be 'SAME', 'VALID' or a sequence of (low, high) pairs, got 'same'; write one of these"),
    (transpose, {"padding": "valid", "strides": (1, 1), "use_consistent_padding": True}, ValueError, "padding must be 'SAME', 'VALID' or a sequence of (low, high) pairs, got 'valid'"),
    (transpose, {"padding": "FULL", "strides": (1, 1)}, ValueError, "padding must be 'SAME', 'SAME_LOWER', 'VALID' or a sequence of (low, high) pairs, got 'FULL'"),
    (transpose, {"padding": 1}, TypeError, "padding must be a string or a sequence of (low, high) pairs of integers, got 1"),
    (transpose, {"padding": ((1, 1),)}, ValueError, "padding must have one pair for each spatial dimension, which are 2, got ((1, 1),)"),
    (transpose, {"padding": ((0, 0), (-6, -6))}, ValueError, "negative padding must not crop more than there is, got padding ((0, 0), (-6, -6)) for spatial sizes (11, 11)"),
    (transpose, {"padding": ((0, 0), (8, 8)), "use_consistent_padding": True}, ValueError, "padding must not crop more than there is, got padding ((0, 0), (8, 8)) for sizes (15, 15), which the spread input has with a padding of 0; crop less"),
    (transpose, {"dimension_numbers": ("NHWC", "HWIO")}, TypeError, "dimension_numbers must be None, three strings or a jax.lax.ConvDimensionNumbers, got ('NHWC', 'HWIO')"),
    (transpose, {"preferred_element_type": "real"}, TypeError, "preferred_element_type must be a dtype, got 'real'"),
    (transpose, {"precision": "low"}, ValueError, "precision must be None"),
    # PyTorch's
    (convolution, {"a": [1.0]}, TypeError, "a must be a JAX or NumPy array, got list"),
    (convolution, {"a": ones(4, 6, 6)}, ValueError, "a and weight must have the same rank, got shapes (4, 6, 6) and (6, 4, 3, 3)"),
    (convolution, {"weight": W.astype("bfloat16")}, TypeError, "a and weight must have the same dtype, got float32 and bfloat16"),
    (convolution, {"a": ones(2, 4, 0, 6), "padding": 3}, ValueError, "a must have at least one position in each spatial dimension, got spatial sizes (0, 6); give it some"),
    (up, {"weight": ones(6, 4, 3, 0)}, ValueError, "weight must have at least one position in each spatial dimension, got spatial sizes (3, 0)"),
    (convolution, {"bias": 1.0}, TypeError, "bias must be a JAX or NumPy array, got float"),
    (convolution, {"bias": ones(5)}, ValueError, "bias must have the shape (C_out,), that is (6,), got (5,); reshape it, or check weight and groups"),
    (convolution, {"bias": ones(1, 6)}, ValueError, "bias must have the shape (C_out,), that is (6,), got (1, 6)"),
    (up, {"bias": ones(6)}, ValueError, "bias must have the shape (C_out,), that is (4,), got (6,)"),
    (convolution, {"bias": ones(6, dtype="bfloat16")}, TypeError, "bias must have the dtype of a and weight, float32, got bfloat16; cast one of them"),
    (convolution, {"stride": (1, 0)}, ValueError, "stride must be at least 1, got (1, 0)"),
    (convolution, {"stride": [1, 1, 1]}, ValueError, "stride must have one number for each spatial dimension, which are 2, got (1, 1, 1)"),
    (convolution, {"stride": []}, ValueError, "stride must have one number for each spatial dimension, which are 2, got ()"),
    (convolution, {"stride": [1.0]}, TypeError, "stride must be an integer or a sequence of integers, got 1.0"),
    (convolution, {"dilation": 0}, ValueError, "dilation must be at least 1, got (0, 0)"),
    (convolution, {"output_padding": -1}, ValueError, "output_padding must be at least 0, got (-1, -1)"),
    (convolution, {"padding": -1}, ValueError, "padding must be at least 0, got (-1, -1)"),
    (convolution, {"padding": ((1, 1), (1, 1))}, TypeError, "padding must be an integer or a sequence of integers, got ((1, 1), (1, 1))"),
    (convolution, {"padding": "SAME"}, ValueError, "padding must be 'same', 'valid', an integer or a sequence of integers, got 'SAME'; write one of these"),
    (convolution, {"padding": "same", "stride": (1, 2)}, ValueError, "padding must be numbers where stride is more than 1, got 'same' and stride (1, 2); write the numbers"),
    (convolution, {"dilation": 3}, ValueError, "the window of weight must span no more than a does with its padding, got (7, 7) and (6, 6); pad by more"),
    (convolution, {"groups": 0}, ValueError, "groups must be at least 1, got 0"),
    (convolution, {"groups": 3}, ValueError, "groups must divide the channels of a, got groups 3 for 4"),
    (convolution, {"groups": 4}, ValueError, "groups must divide the output channels of weight, got groups 4 for 6"),
    (convolution, {"groups": 2}, ValueError, "the input channels of weight must number the channels of a divided by groups, got 4 for 4 // 2; check groups and that weight is (C_out, C_in / groups, *window)"),
    (convolution, {"groups": 1.0}, TypeError, "groups must be an integer, got 1.0"),
    (convolution, {"precision": "low"}, ValueError, "precision must be None"),
    (up, {"groups": 0}, ValueError, "groups must be at least 1, got 0; write 1"),
    (up, {"groups": 4}, ValueError, "groups must divide the channels of a, got groups 4 for 6"),
    (up, {"a": X}, ValueError, "the input channels of weight must number the channels of a, got 6 for 4; check that weight is (C_in, C_out / groups, *window), as transposed convolutions have it"),
    (up, {"padding": "same"}, TypeError, "padding must be an integer or a sequence of integers if transposed, got 'same'; write the numbers"),
    (up, {"padding": (0, -1)}, ValueError, "padding must be at least 0, got (0, -1)"),
    (up, {"padding": 7}, ValueError, "padding must leave something of the output, got padding (7, 7) for output sizes (-1, -1); pad by less"),
    (up, {"stride": 1, "padding": 4}, ValueError, "padding must leave something of the output, got padding (4, 4) for output sizes (0, 0)"),
    (up, {"output_padding": (1, 2)}, ValueError, "output_padding must be less than stride or less than dilation, got (1, 2) for (2, 2) and (1, 1); lower what is more"),
    (up, {"output_padding": 4, "dilation": 4}, ValueError, "output_padding must be less than stride or less than dilation, got (4, 4) for (2, 2) and (4, 4)"),
    (up, {"precision": "low"}, ValueError, "precision must be None"),
    (general, {"window_strides": {1: 1, 2: 1}}, TypeError, "window_strides must be a sequence of integers, got {1: 1, 2: 1}; write (1, 1), for example"),
    (up, {"groups": -1, "bias": np.zeros(4, "float32")}, ValueError, "groups must be at least 1, got -1; write 1"),
    (convolution, {"transposed": "False"}, TypeError, "transposed must be a bool, got False; write True or False"),
    (convolution, {"transposed": np.array([True, False])}, TypeError, "transposed must be a bool, got [ True False]; write True or False"),
    # epilogues
    (bias_act, {"residual": ones(2, 6, 1, 1)}, ValueError, "residual must have the shape of the result (2, 6, 6, 6), got (2, 6, 1, 1); broadcast it, or check padding and strides"),
    (bias_act, {"residual": ones(6, 6, 6)}, ValueError, "residual must have the shape of the result (2, 6, 6, 6), got (6, 6, 6)"),
    (bias_act, {"window_strides": (2, 2)}, ValueError, "residual must have the shape of the result (2, 6, 3, 3), got (2, 6, 6, 6)"),
    (bias_act, {"residual": Y.astype("bfloat16")}, TypeError, "residual must have the dtype of the result, float32, got bfloat16; cast it, or give preferred_element_type"),
    (bias_act, {"residual": 0.0}, TypeError, "residual must be a JAX or NumPy array, got float"),
    (bias_act, {"bias": ones(5)}, ValueError, "bias must have the shape (K,), that is (6,), got (5,); reshape it, or check w"),
    (bias_act, {"bias": ones(1, 6, 1, 1)}, ValueError, "bias must have the shape (K,), that is (6,), got (1, 6, 1, 1)"),
    (bias_act, {"bias": ones()}, ValueError, "bias must have the shape (K,), that is (6,), got ()"),
    (bias_act, {"bias": B.astype("float16")}, TypeError, "bias must have the dtype of the result, float32, got float16; cast it"),
    (bias_act, {"bias": 1.0}, TypeError, "bias must be a JAX or NumPy array, got float"),
    (bias_act, {"activation": "swish"}, ValueError, "activation must be one of relu, relu6, leaky_relu, gelu, gelu_tanh, silu, elu, softplus, tanh, sigmoid or None, got 'swish'; give any other as a function"),
    (bias_act, {"activation": ""}, ValueError, "activation must be one of relu, "),
    (bias_act, {"activation": 1}, TypeError, "activation must be a name, a function or None, got 1; write 'relu', for example"),
    (bias_act, {"x": X.astype("complex64"), "w": W.astype("complex64"), "bias": None, "residual": None}, TypeError, "activation must be None for a result of complex64, got 'relu'; give it as a function if it is meant"),
    (bias_act, {"x": X.astype("int8"), "w": W.astype("int8"), "bias": None, "residual": None, "activation": "gelu"}, TypeError, "activation must be relu or None for a result of int8, got 'gelu'"),
    (bias_act, {"x": X.astype(bool), "w": W.astype(bool), "bias": None, "residual": None}, TypeError, "activation must be None for a result of bool, got 'relu'"),
    (bias_act, {"x": [1.0]}, TypeError, "x must be a JAX or NumPy array, got list"),
    (bias_act, {"w": ones(6, 3, 3, 3)}, ValueError, "the input channels of w must number the channels of x divided by feature_group_count, got 3 for 4 // 1"),
    (bias_act, {"window_strides": (0, 1)}, ValueError, "window_strides must be at least 1, got (0, 1)"),
    (bias_act, {"padding": "FULL"}, ValueError, "padding must be 'SAME', 'SAME_LOWER', 'VALID' or a sequence of (low, high) pairs, got 'FULL'"),
    (bias_act, {"preferred_element_type": "bfloat16"}, TypeError, "preferred_element_type must be of the kind"),
    (up_bias_act, {"bias": ones(4)}, ValueError, "bias must have the shape (K,), that is (6,), got (4,)"),
    (up_bias_act, {"residual": ones(2, 6, 6, 6)}, ValueError, "residual must have the shape of the result (2, 12, 12, 6), got (2, 6, 6, 6)"),
    (up_bias_act, {"activation": "RELU"}, ValueError, "activation must be one of relu, "),
    (up_bias_act, {"x": X}, ValueError, "the input channels of w must number the channels of x, got 4 for 6; check that dimension_numbers, which put channels last by default"),
]  # fmt: skip


def identity(row) -> str:
    function, arguments, exception, _ = row
    return f"{NAMES[function]}-{'-'.join(arguments)}-{exception.__name__}"


@pytest.mark.parametrize(
    "function, arguments, exception, text", REFUSED, ids=map(identity, REFUSED)
)
def test_refused(function, arguments, exception, text: str):
    caller, rule = re.escape(f"jaxcudnn.{NAMES[function]}: "), re.escape(text)
    with pytest.raises(exception, match=f"^{caller}.*{rule}") as error:
        function(**arguments)
    assert re.search("got .*; ", str(error.value), flags=re.DOTALL)  # values, then the remedy


@pytest.mark.parametrize("function", NAMES, ids=NAMES.get)
def test_what_the_rows_change_is_accepted(function):
    function()


def test_errors_come_when_tracing():
    with pytest.raises(ValueError, match="the input channels of rhs"):
        jax.eval_shape(general, X, jax.ShapeDtypeStruct((6, 3, 3, 3), "float32"))


@pytest.mark.parametrize("argument", ["window_strides", "padding", "feature_group_count"])
def test_traced_geometry_is_refused(argument: str):
    values = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "feature_group_count": 1}
    with pytest.raises(
        TypeError, match=f"jaxcudnn.conv_general_dilated: {argument} must be .* integers?"
    ):
        jax.jit(lambda value: general(**{argument: value}))(values[argument])


def test_transposed_must_be_known():
    with pytest.raises(
        TypeError, match=r"^jaxcudnn.convolution: transposed must be a bool, got .*; write True or"
    ):
        jax.jit(lambda value: convolution(transposed=value))(True)


def test_arrays_that_jax_does_not_take_are_refused():
    with pytest.raises(TypeError):
        general(lhs=np.full((2, 4, 6, 6), None))


@pytest.mark.parametrize("asked", ["float64", jnp.float64, np.dtype("float64")])
def test_float64_that_jax_does_not_have_is_said(asked):
    """As `lax` says it."""
    functions: tuple[Any, ...] = (jaxcudnn.conv, lax.conv)
    for function in functions:
        with pytest.warns(UserWarning, match="float64.* is not available"):
            assert function(X, W, (1, 1), "SAME", None, asked).dtype == "float32"
    assert jaxcudnn.conv(X, W, (1, 1), "SAME", None, float).dtype == "float32"
