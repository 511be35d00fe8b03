# SPDX-License-Identifier: Apache-2.0
"""Small networks of Flax and Equinox, which know nothing of this package.

Between them they have every kind of layer: strided, dilated, grouped, depthwise, pointwise and
transposed, in channels-last and channels-first arrays. All functions in them are smooth, so that
small errors stay small.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class Network(NamedTuple):
    """A function of parameters and images, and what they are like."""

    apply: Callable[[Any, jax.Array], jax.Array]
    parameters: Any
    """A tree of `jax.ShapeDtypeStruct`s."""
    images: jax.ShapeDtypeStruct
    convolutions: int
    """How many layers are convolutions."""

    def train(self, parameters: Any, images: jax.Array) -> tuple[jax.Array, Any]:
        """The outputs, and the gradient of the mean of their squares by the parameters."""

        def loss(parameters):
            outputs = self.apply(parameters, images)
            return jnp.mean(outputs**2), outputs

        gradient, outputs = jax.grad(loss, has_aux=True)(parameters)
        return outputs, gradient

    def arrays(self, seed: int) -> tuple[Any, np.ndarray]:
        """Parameters and images, in float64: filters scaled so that variances stay as they are."""
        draw = np.random.default_rng(seed)

        def parameter(kind: jax.ShapeDtypeStruct) -> np.ndarray:
            inputs = np.prod(kind.shape) / max(kind.shape, default=1)
            return draw.standard_normal(kind.shape) / np.sqrt(max(inputs, 1))

        parameters = jax.tree.map(parameter, self.parameters)
        return parameters, draw.standard_normal(self.images.shape)


class UNet(nn.Module):
    """Halves the images twice, doubles them again, and keeps what they were."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kept = []
        for features in (16, 32):
            x = nn.silu(nn.Conv(features, (3, 3))(x))
            kept.append(x)
            x = nn.silu(nn.Conv(features, (3, 3), strides=(2, 2))(x))
        x = nn.silu(nn.Conv(32, (3, 3), kernel_dilation=(2, 2))(x))
        x = nn.silu(nn.Conv(32, (5, 5), feature_group_count=32)(x))
        x = nn.silu(nn.Conv(48, (3, 3), feature_group_count=4)(nn.Conv(64, (1, 1))(x)))
        for features in (32, 16):
            x = nn.silu(nn.ConvTranspose(features, (4, 4), strides=(2, 2))(x))
            x = jnp.concatenate([x, kept.pop()], axis=-1)
            x = nn.silu(nn.Conv(features, (3, 3), padding="CIRCULAR")(x))
        return nn.Conv(3, (1, 1))(x)


def unet() -> Network:
    model = UNet()
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    parameters = jax.eval_shape(model.init, jax.random.key(0), images)
    return Network(lambda params, x: model.apply(params, x), parameters, images, 13)  # pyright: ignore


class Layers(eqx.Module):
    """Layers for one image, channels first."""

    layers: list[eqx.Module]

    def __init__(self, key: jax.Array):
        keys = iter(jax.random.split(key, 6))
        self.layers = [
            eqx.nn.Conv2d(3, 16, 7, stride=2, padding=3, key=next(keys)),
            eqx.nn.Conv2d(16, 32, 3, padding=2, dilation=2, key=next(keys)),
            eqx.nn.Conv2d(32, 32, 3, padding="SAME", groups=8, key=next(keys)),
            eqx.nn.Conv2d(32, 32, 2, stride=2, key=next(keys)),
            eqx.nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, key=next(keys)),
            eqx.nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1, groups=1, key=next(keys)),
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jax.nn.silu(layer(x))  # pyright: ignore[reportCallIssue]
        return x


def equinox_layers() -> Network:
    kinds = eqx.filter_eval_shape(Layers, jax.random.key(0))
    parameters, static = eqx.partition(kinds, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def apply(parameters: Any, images: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(parameters, static))(images)

    images = jax.ShapeDtypeStruct((4, 3, 32, 32), jnp.float32)
    return Network(apply, parameters, images, 6)


NETWORKS = {"flax": unet, "equinox": equinox_layers}
