# SPDX-License-Identifier: Apache-2.0
"""The convolutions that are measured, and the programs that compute them in JAX.

Images are N positions C and filters K positions C, the layouts that cuDNN takes without a copy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxcudnn
from jaxcudnn._dtypes import Dtypes
from jaxcudnn._spec import ConvSpec, Layout

PASSES = {"fprop": ("x", "w"), "dgrad": ("y", "w"), "wgrad": ("x", "y")}
"""The operations, with the arrays that each is given; it computes the third of x, w and y."""

Convolve = Callable[..., jax.Array]
"""`jax.lax.conv_general_dilated`, or a function with its parameters."""


@dataclass(frozen=True)
class Conv:
    """A convolution with equal padding on both sides, and the same geometry in all dimensions."""

    name: str
    batch: int
    spatial: tuple[int, ...]
    c: int
    k: int
    window: int
    stride: int = 1
    padding: int = 0

    @property
    def dimension_numbers(self) -> tuple[str, str, str]:
        """The layouts of images, filters and images, as `lax` spells them."""
        positions = "DHW"[3 - len(self.spatial) :]
        return f"N{positions}C", f"O{positions}I", f"N{positions}C"

    def spec(self, dtype: str) -> ConvSpec:
        """Give what jaxcudnn's primitives are bound with."""
        rank = len(self.spatial)
        return ConvSpec(
            x_shape=(self.batch, self.c, *self.spatial),
            w_shape=(self.k, self.c, *[self.window] * rank),
            strides=(self.stride,) * rank,
            padding=((self.padding, self.padding),) * rank,
            dilation=(1,) * rank,
            groups=1,
            flip=False,
            dtypes=Dtypes(dtype, dtype, dtype),
            precision=(lax.Precision.DEFAULT, lax.Precision.DEFAULT),
        )

    @property
    def layout(self) -> Layout:
        """Give what else jaxcudnn's primitives are bound with."""
        rank = len(self.spatial)
        channels_last = (0, rank + 1, *range(1, rank + 1))
        return Layout(channels_last, channels_last, channels_last)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the shapes of the arrays x, w and y in memory order."""
        spec = self.spec("float32")
        logical = {role: spec.shape(role) for role in ("x", "w", "y")}
        return {role: (n, *positions, c) for role, (n, c, *positions) in logical.items()}

    def shrunk(self) -> "Conv":
        """Give a convolution of the same form that takes a CPU no time."""
        spatial = tuple(min(size, 2 * self.window) for size in self.spatial)
        return replace(self, batch=1, spatial=spatial, c=min(self.c, 4), k=min(self.k, 4))

    @property
    def geometry(self) -> dict[str, Any]:
        """Give the arguments of `jax.lax.conv_general_dilated` beside the arrays."""
        rank = len(self.spatial)
        return {
            "window_strides": (self.stride,) * rank,
            "padding": [(self.padding, self.padding)] * rank,
            "dimension_numbers": self.dimension_numbers,
        }

    def with_epilogue(
        self, x: jax.Array, w: jax.Array, bias: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        """Compute relu(conv(x, w) + residual + bias) by jaxcudnn."""
        return jaxcudnn.conv_bias_act(x, w, bias, residual, "relu", **self.geometry)

    def function(self, op: str, convolve: Convolve, dtype: str) -> Callable[..., jax.Array]:
        """Give the function of an operation, with the gradients as `jax.grad` writes them."""

        def forward(x, w):
            return convolve(x, w, **self.geometry)

        def aval(role):
            return jax.ShapeDtypeStruct(self.shapes()[role], jnp.dtype(dtype))

        def dgrad(dy, w):
            return jax.linear_transpose(lambda x: forward(x, w), aval("x"))(dy)[0]

        def wgrad(x, dy):
            return jax.linear_transpose(lambda w: forward(x, w), aval("w"))(dy)[0]

        return {"fprop": forward, "dgrad": dgrad, "wgrad": wgrad}[op]


def resnet(name: str, size: int, c: int, k: int, window: int, stride: int = 1) -> Conv:
    """Give a layer of ResNet-50 at its usual padding, for a batch of 128 images."""
    return Conv(name, 128, (size, size), c, k, window, stride, padding=window // 2)


RESNET50 = (
    resnet("7x7/2 224 3-64", 224, 3, 64, 7, 2),
    resnet("3x3 56 64-64", 56, 64, 64, 3),
    resnet("1x1 56 64-256", 56, 64, 256, 1),
    resnet("3x3/2 56 128-128", 56, 128, 128, 3, 2),
    resnet("1x1/2 56 256-512", 56, 256, 512, 1, 2),
    resnet("3x3 28 128-128", 28, 128, 128, 3),
    resnet("1x1 14 1024-256", 14, 1024, 256, 1),
    resnet("3x3 14 256-256", 14, 256, 256, 3),
    resnet("3x3 7 512-512", 7, 512, 512, 3),
    resnet("1x1 7 512-2048", 7, 512, 2048, 1),
)
"""Ten layers, from the first to the last stage: the stem, the shortcut of a stage that halves the
image, both kinds of 1x1 layer (one that widens, one that narrows) and every size of 3x3 layer."""

SMALL = Conv("3x3 14 64-64", 8, (14, 14), 64, 64, 3, padding=1)
"""A layer so small that the host's share is what matters."""

HEADLINES = (
    (Conv("patch embedding 16x16/16 224 3-768", 64, (224, 224), 3, 768, 16, 16), "dgrad"),
    (Conv("3-D 3x3x3/2 48 64-128", 4, (48, 48, 48), 64, 128, 3, 2, padding=1), "dgrad"),
)
"""Gradients that XLA writes as forward convolutions with dilated inputs or huge filters."""

PLANNED = tuple(
    Conv(f"{window}x{window} {size} {c}-{2 * c}", 32, (size, size), c, 2 * c, window, stride, pad)
    for size, c in ((60, 48), (30, 80), (20, 160), (10, 320))
    for window, stride, pad in ((1, 1, 0), (3, 1, 1), (3, 2, 1), (5, 1, 2))
)
"""Sixteen layers for which nothing else in a process has asked, so that their plans are new."""


def chain(conv: Conv, convolve: Convolve, *, relu: bool) -> Callable[..., jax.Array]:
    """Give a function of an image and a list of filters that applies one layer after another."""

    def apply(x: jax.Array, filters: Sequence[jax.Array]) -> jax.Array:
        layer = conv.function("fprop", convolve, str(x.dtype))
        for w in filters:
            x = layer(x, w)
            x = jax.nn.relu(x) if relu else x
        return x

    return apply


class RandomData:
    """Normal numbers, drawn once and cut to any shape: a generator for each shape would compile."""

    def __init__(self, dtype: str) -> None:
        """Start with an empty pool."""
        self._dtype = dtype
        self._pool = jnp.zeros(0, dtype)

    def draw(self, shape: Sequence[int], offset: int) -> jax.Array:
        """Give an array of numbers; `offset` makes arrays of equal shape differ."""
        end = offset + math.prod(shape)
        if self._pool.size < end:
            self._pool = jax.random.normal(jax.random.key(0), (end,), self._dtype)
        return jax.block_until_ready(self._pool[offset:end].reshape(shape))
