# SPDX-License-Identifier: Apache-2.0
"""The activations that have names, and how they are differentiated.

What a derivative needs is kept from the forward to the backward pass. Most derivatives are
functions of the activation's own output y, which the next layer keeps anyway:

    relu  [y > 0]     relu6  [0 < y < 6]     leaky_relu  1 or 0.01     elu  1 or y + 1
    tanh  1 - y^2     sigmoid  y (1 - y)     softplus  1 - exp(-y)

Those of gelu, gelu_tanh and silu, which are not monotonic, need the input. At a kink they are what
those of `jax.nn` are.

`activation_grad(t, saved)` multiplies t by the derivative. It is a primitive of its own so that it
is `saved` that is kept: of a product with a comparison, JAX would keep the comparison as well.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from ._dtypes import accumulator, is_complex
from ._spec import Epilogue
from ._varying import equally_varying

Function = Callable[[jax.Array], jax.Array]

_LEAK = 0.01


class Activation(NamedTuple):
    """A function of one number."""

    formula: Function
    derivative: Function
    """Of what `of_output` says."""
    of_output: bool
    """Whether the derivative is computed from the output, and not from the input."""


def _step(x: jax.Array, inside: jax.Array) -> jax.Array:
    return inside.astype(x.dtype)


def _normal_density(x: jax.Array) -> jax.Array:
    return jnp.exp(-x * x / 2) / math.sqrt(2 * math.pi)


# With its derivative, since that of lax.erfc fails under jax.shard_map (jax 0.12).
@jax.custom_jvp
def _normal_cdf(x: jax.Array) -> jax.Array:
    return lax.erfc(-x / math.sqrt(2)) / 2


@_normal_cdf.defjvp
def _normal_cdf_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return _normal_cdf(x), _normal_density(x) * dx


def _gelu_derivative(x: jax.Array) -> jax.Array:
    """Of x times the normal distribution's cumulative function."""
    return _normal_cdf(x) + x * _normal_density(x)


def _gelu_tanh_derivative(x: jax.Array) -> jax.Array:
    """Of x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = jnp.tanh(scale * (x + cubic * x**3))
    return (1 + t) / 2 + x * (1 - t * t) * scale * (1 + 3 * cubic * x * x) / 2


def _silu_derivative(x: jax.Array) -> jax.Array:
    s = jax.nn.sigmoid(x)
    return s * (1 + x * (1 - s))


ACTIVATIONS = {
    "relu": Activation(jax.nn.relu, lambda y: _step(y, y > 0), True),
    "relu6": Activation(jax.nn.relu6, lambda y: _step(y, (y > 0) & (y < 6)), True),
    "leaky_relu": Activation(
        partial(jax.nn.leaky_relu, negative_slope=_LEAK),
        lambda y: jnp.where(y >= 0, 1.0, _LEAK).astype(y.dtype),
        True,
    ),
    "gelu": Activation(partial(jax.nn.gelu, approximate=False), _gelu_derivative, False),
    "gelu_tanh": Activation(partial(jax.nn.gelu, approximate=True), _gelu_tanh_derivative, False),
    "silu": Activation(jax.nn.silu, _silu_derivative, False),
    "elu": Activation(jax.nn.elu, lambda y: jnp.where(y > 0, jnp.ones_like(y), y + 1), True),
    "softplus": Activation(jax.nn.softplus, lambda y: -jnp.expm1(-y), True),
    "tanh": Activation(jnp.tanh, lambda y: 1 - y * y, True),
    "sigmoid": Activation(jax.nn.sigmoid, lambda y: y * (1 - y), True),
}
"""By the names that users and the extension know them by."""

OF_INTEGERS = ("relu",)
"""Those that give an integer for an integer."""

activate_p = Primitive("activate")
activation_grad_p = Primitive("activation_grad")


def accumulated(array: jax.Array) -> jax.Array:
    """Convert an array to the dtype in which its numbers are summed and activated."""
    dtype = array.dtype.name
    if is_complex(dtype):
        return array
    return lax.convert_element_type(array, accumulator(dtype, dtype, dtype))


def activate(x: jax.Array, activation: str, dtype: str) -> jax.Array:
    """Apply an activation in the accumulation dtype, and round to `dtype`.

    The empty name stands for none, which rounds alone.
    """
    if not activation:
        return lax.convert_element_type(x, dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _activate(x, activation=activation, dtype=dtype)
    return activate_p.bind(x, activation=activation, dtype=dtype)


def activation_grad(t: jax.Array, saved: jax.Array, activation: str, dtype: str) -> jax.Array:
    """Multiply t by an activation's derivative, and round to `dtype`.

    Args:
        t: of the shape of `saved`.
        saved: the activation's output or input, as the table says.
        activation: its name; the empty one stands for none, which rounds alone.
        dtype: that of the product.
    """
    if not activation:
        return lax.convert_element_type(t, dtype)
    t, saved = equally_varying(t, saved)
    return activation_grad_p.bind(t, saved, activation=activation, dtype=dtype)


def finish(y: jax.Array, *addends: jax.Array, epilogue: Epilogue, axis: int) -> jax.Array:
    """Add to a convolution's result what its epilogue adds, activate it and round it.

    Args:
        y: the result.
        *addends: residual and bias, those of the two that there are.
        epilogue: what is added and applied.
        axis: that of the channels of y.
    """
    remaining = iter(addends)
    total = accumulated(y)
    if epilogue.residual:
        total = total + accumulated(next(remaining))
    if epilogue.bias:
        total = total + spread(next(remaining), total.shape, axis)
    return activate(total, epilogue.activation, y.dtype.name)


def spread(bias: jax.Array, shape: Sequence[int], axis: int) -> jax.Array:
    """Spread a bias over an array, in the dtype in which its gradient is then summed."""
    ones = [1] * len(shape)
    ones[axis] = shape[axis]
    return jnp.broadcast_to(accumulated(bias).reshape(ones), shape)


def _activate(x: jax.Array, *, activation: str, dtype: str) -> jax.Array:
    return lax.convert_element_type(ACTIVATIONS[activation].formula(accumulated(x)), dtype)


def _activation_grad(t: jax.Array, saved: jax.Array, *, activation: str, dtype: str) -> jax.Array:
    derivative = ACTIVATIONS[activation].derivative(accumulated(saved))
    product = lax.convert_element_type(t, derivative.dtype) * derivative
    return lax.convert_element_type(product, dtype)


def _activate_aval(x: ShapedArray, *, activation: str, dtype: str) -> ShapedArray:
    return x.update(dtype=jnp.dtype(dtype), weak_type=False)


def _activation_grad_aval(
    t: ShapedArray, saved: ShapedArray, *, activation: str, dtype: str
) -> ShapedArray:
    assert t.shape == saved.shape, (t, saved)
    return saved.update(dtype=jnp.dtype(dtype), weak_type=False)


def _activate_jvp(primals, tangents, *, activation: str, dtype: str):
    (x,), (dx,) = primals, tangents
    y = activate(x, activation, dtype)
    # What is kept is rounded: an input in the accumulation dtype would take twice the memory.
    saved = y if ACTIVATIONS[activation].of_output else lax.convert_element_type(x, dtype)
    return y, activation_grad(dx, saved, activation, dtype)


def _activation_grad_jvp(primals, tangents, *, activation: str, dtype: str):
    t, saved = primals
    dt, dsaved = tangents
    out = activation_grad(t, saved, activation, dtype)
    terms = []
    if not isinstance(dt, ad.Zero):
        terms.append(activation_grad(dt, saved, activation, dtype))
    if not isinstance(dsaved, ad.Zero):
        t, saved, dsaved = equally_varying(t, saved, dsaved)
        curved = partial(_activation_grad, t, activation=activation, dtype=dtype)
        terms.append(jax.jvp(curved, (saved,), (dsaved,))[1])
    first, *others = terms
    return out, sum(others, first)


def _activation_grad_transpose(ct, t, saved, *, activation: str, dtype: str):
    return activation_grad(ct, saved, activation, t.aval.dtype.name), None


def _activate_batch(arrays, axes, *, activation: str, dtype: str):
    return activate(arrays[0], activation, dtype), axes[0]


def _activation_grad_batch(arrays, axes, *, activation: str, dtype: str):
    size = next(
        array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
    )
    t, saved = (
        jnp.broadcast_to(array, (size, *array.shape)) if axis is None
        else jnp.moveaxis(array, axis, 0)
        for array, axis in zip(arrays, axes, strict=True)
    )  # fmt: skip
    return activation_grad(t, saved, activation, dtype), 0


def _register(primitive: Primitive, formula, aval, jvp, batch) -> None:
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(aval)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(formula, multiple_results=False))


ad.deflinear2(activation_grad_p, _activation_grad_transpose)
_register(activate_p, _activate, _activate_aval, _activate_jvp, _activate_batch)
_register(
    activation_grad_p, _activation_grad, _activation_grad_aval, _activation_grad_jvp,
    _activation_grad_batch,
)  # fmt: skip
