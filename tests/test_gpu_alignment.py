# SPDX-License-Identifier: Apache-2.0
"""Operands and results inside larger buffers, at addresses that cuDNN's fast plans refuse.

XLA passes a contiguous slice of an array as a pointer into it. Parameters kept as one flat vector,
as `jax.flatten_util.ravel_pytree` makes them, arrive so at addresses aligned to one element. The
numbers are small integers, so results are compared with ==.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jaxcudnn
from jaxcudnn import _load

pytestmark = pytest.mark.gpu

NHWC = ("NHWC", "OHWI", "NHWC")
X, W = (4, 16, 16, 64), (64, 3, 3, 64)  # an image does not fit where a filter does


def conv(x, w):
    return jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def integers(*shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-1, 2, shape), dtype)


def plans_built_by(call):
    before = _load.native().cache_info().misses
    result = jax.block_until_ready(call())
    return result, _load.native().cache_info().misses - before


def fprop(x, w, dy):
    return conv(x, w)


def dgrad(x, w, dy):
    return jax.linear_transpose(lambda x: conv(x, w), x)(dy)[0]


def wgrad(x, w, dy):
    return jax.linear_transpose(lambda w: conv(x, w), w)(dy)[0]


OPERANDS = {fprop: ("x", "w"), dgrad: ("dy", "w"), wgrad: ("x", "dy")}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    ("f", "sliced"), [(f, name) for f, names in OPERANDS.items() for name in names]
)
def test_operand_at_an_odd_element(f, sliced, dtype):
    arrays = {
        "x": integers(*X, dtype=dtype),
        "w": integers(*W, dtype=dtype, seed=1),
        "dy": integers(*X, dtype=dtype, seed=2),
    }
    expected = jax.jit(f)(**arrays)
    _load.native().clear_cache()
    whole = arrays[sliced]
    flat = jnp.concatenate([jnp.ones(1, dtype), whole.ravel(), jnp.ones(1, dtype)])

    @jax.jit
    def from_flat(flat, **others):
        return f(**others, **{sliced: flat[1:-1].reshape(whole.shape)})

    others = {name: array for name, array in arrays.items() if name != sliced}
    result, built = plans_built_by(lambda: from_flat(flat, **others))
    assert jnp.array_equal(result, expected)
    # A filter is copied into the workspace. Images have no room there and take a second plan, which
    # shows that XLA did pass the slice in place.
    assert built == (1 if sliced == "w" else 2)


@pytest.mark.parametrize("f", OPERANDS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_result_at_an_odd_element(f, dtype):
    arrays = {
        "x": integers(*X, dtype=dtype),
        "w": integers(*W, dtype=dtype, seed=1),
        "dy": integers(*X, dtype=dtype, seed=2),
    }
    expected = jax.jit(f)(**arrays)

    @jax.jit
    def into_flat(flat, arrays):
        return jax.lax.dynamic_update_slice(flat, f(**arrays).ravel(), (1,))

    flat = jnp.ones(expected.size + 2, dtype)
    result = into_flat(flat, arrays)
    assert jnp.array_equal(result[1:-1].reshape(expected.shape), expected)
    assert result[0] == result[-1] == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_training_step_on_one_flat_vector(dtype):
    """Gradients with respect to a flat parameter vector equal those of separate arrays."""
    x = integers(*X, dtype=dtype)
    filters = {
        "scale": jnp.ones(1, dtype),  # pushes everything behind it to an odd element
        "w1": integers(*W, dtype=dtype, seed=1),
        "w2": integers(*W, dtype=dtype, seed=2),
    }

    def loss(filters):
        y = jnp.sign(conv(x, filters["w1"]))
        return jnp.sum(conv(y, filters["w2"]).astype(jnp.float32)) * filters["scale"][0].astype(
            jnp.float32
        )

    flat, unravel = ravel_pytree(filters)
    expected = jax.jit(jax.grad(loss))(filters)
    gradient = unravel(jax.jit(jax.grad(lambda flat: loss(unravel(flat))))(flat))
    for name, value in expected.items():
        assert jnp.array_equal(gradient[name], value), name
