# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 (https://arxiv.org/abs/1512.03385), its convolutions given: 53 of them, 158 with both
gradients of all but the gradient of the images. A scale and a shift stand for normalisation."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxcudnn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
CLASSES = 1000
NHWC = ("NHWC", "OHWI", "NHWC")

Parameters = dict[str, dict[str, Any]]
Convolve = Callable[..., jax.Array]


def layers() -> Iterator[tuple[str, int, int, int, int]]:
    """Give name, window, stride, input and output channels of every convolution."""
    yield "stem", 7, 2, 3, 64
    channels = 64
    for stage, (width, blocks) in enumerate(STAGES):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            name = f"{stage}.{block}"
            yield f"{name}.narrow", 1, 1, channels, width
            yield f"{name}.window", 3, stride, width, width
            yield f"{name}.widen", 1, 1, width, 4 * width
            if block == 0:
                yield f"{name}.shortcut", 1, stride, channels, 4 * width
            channels = 4 * width


def parameters() -> Parameters:
    """Draw them, in bfloat16."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        scale = np.sqrt(2 / np.prod(shape[1:]))
        return jnp.asarray(scale * draw.standard_normal(shape, np.float32), jnp.bfloat16)

    found: Parameters = {
        name: {
            "filter": normal(outputs, window, window, inputs),
            "scale": jnp.ones((1, 1, 1, outputs), jnp.bfloat16),
            "shift": jnp.zeros((1, 1, 1, outputs), jnp.bfloat16),
        }
        for name, window, _, inputs, outputs in layers()
    }
    found["head"] = {"matrix": normal(4 * STAGES[-1][0], CLASSES)}
    return found


def apply(convolve: Convolve, given: Parameters, images: jax.Array) -> jax.Array:
    """Give the logits, of shape (N, CLASSES), of images (N, H, W, 3)."""
    strides = {name: stride for name, _, stride, _, _ in layers()}

    def layer(name: str, x: jax.Array) -> jax.Array:
        own, stride = given[name], strides[name]
        y = convolve(x, own["filter"], (stride, stride), "SAME", dimension_numbers=NHWC)
        return y * own["scale"] + own["shift"]

    x = jax.nn.relu(layer("stem", images))
    window, steps = (1, 3, 3, 1), (1, 2, 2, 1)
    x = lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, window, steps, "SAME")
    for stage, (_, blocks) in enumerate(STAGES):
        for block in range(blocks):
            name = f"{stage}.{block}"
            y = jax.nn.relu(layer(f"{name}.narrow", x))
            y = jax.nn.relu(layer(f"{name}.window", y))
            y = layer(f"{name}.widen", y)
            x = jax.nn.relu(y + (layer(f"{name}.shortcut", x) if block == 0 else x))
    return x.mean((1, 2)) @ given["head"]["matrix"]


def step(convolve: Convolve, given: Parameters, images: jax.Array, labels: jax.Array) -> Parameters:
    """Give the parameters after a step of gradient descent."""

    def loss(given: Parameters) -> jax.Array:
        logits = apply(convolve, given, images).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    gradients = jax.grad(loss)(given)
    return jax.tree.map(lambda p, g: p - jnp.asarray(0.01, p.dtype) * g, given, gradients)


def first_step(convolutions: str, *, images: int, size: int) -> dict[str, Any]:
    """Time the first call of a jitted step in this process, and the next ones."""
    library: Any = {"jaxcudnn": jaxcudnn, "lax": lax}[convolutions]
    given, labels = parameters(), jnp.zeros(images, jnp.int32)
    batch = jax.block_until_ready(jnp.ones((images, size, size, 3), jnp.bfloat16))
    train = jax.jit(partial(step, library.conv_general_dilated))

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(train(given, batch, labels))
        return time.perf_counter() - start

    first = timed()
    return {"seconds": first, "next_ms": 1e3 * min(timed() for _ in range(5))}
