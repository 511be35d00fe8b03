# SPDX-License-Identifier: Apache-2.0
"""PLACEHOLDER, to be replaced by the real file of this name when branches are merged."""

from typing import Any

import jax

from ._activations import activate
from ._api import conv_general_dilated
from ._variants import conv_transpose


def conv_bias_act(
    x: Any,
    w: Any,
    bias: Any = None,
    residual: Any = None,
    activation: Any = "relu",
    *,
    window_strides: Any = None,
    padding: Any,
    **arguments: Any,
) -> jax.Array:
    """Compute act(conv + residual + bias) as a plain composition."""
    assert residual is None
    y = conv_general_dilated(x, w, window_strides or (1,) * (x.ndim - 2), padding, **arguments)
    numbers = jax.lax.conv_dimension_numbers(x.shape, w.shape, arguments.get("dimension_numbers"))
    return _finish(y, bias, activation, numbers.out_spec[1])


def conv_transpose_bias_act(
    x: Any,
    w: Any,
    bias: Any = None,
    residual: Any = None,
    activation: Any = "relu",
    *,
    strides: Any,
    padding: Any,
    **arguments: Any,
) -> jax.Array:
    """Compute act(conv_transpose + residual + bias) as a plain composition."""
    assert residual is None
    y = conv_transpose(x, w, strides, padding, **arguments)
    numbers = arguments.get("dimension_numbers")
    axis = jax.lax.conv_dimension_numbers(x.shape, w.shape, numbers).out_spec[1]
    return _finish(y, bias, activation, y.ndim - 1 if numbers is None else axis)


def _finish(y: jax.Array, bias: Any, activation: Any, axis: int) -> jax.Array:
    if bias is not None:
        assert bias.shape == (y.shape[axis],) and bias.dtype == y.dtype
        y = y + jax.lax.broadcast_in_dim(bias, y.shape, (axis,))
    return activate(y, activation, y.dtype.name)
