# SPDX-License-Identifier: Apache-2.0
"""PLACEHOLDER, to be replaced by the real file of this name when branches are merged."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def activate(x: jax.Array, activation: str, dtype: str) -> jax.Array:
    """Apply an activation and round."""
    return ACTIVATIONS[activation](x.astype("float32")).astype(dtype)
