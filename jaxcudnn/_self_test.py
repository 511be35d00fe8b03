# SPDX-License-Identifier: Apache-2.0
"""A small convolution and its gradients, compared with their definition in NumPy.

The definition, for input position i, window position r and output position p that meet where
i = s p + d r - lo in each dimension, is that y sums x w, dx sums dy w and dw sums x dy. All numbers
are small integers, so that the sums are exact however they are computed, TF32 included.
"""

import itertools
from typing import Any

import jax
import numpy as np

from . import _load, _options
from ._api import conv_general_dilated

_X, _W = (2, 9, 8, 8), (16, 3, 2, 8)  # N H W C and K, window, C
_STRIDES, _DILATION, _PADDING = (2, 1), (1, 2), ((1, 2), (0, 1))
_OUT = (5, 7)
_LAYOUT = ("NHWC", "OHWI", "NHWC")


def wrong(device: Any = None) -> list[str]:
    """Say what is wrong with the forward convolution and its gradients, a sentence each.

    Args:
      device: a GPU, where cuDNN must compute them, or None for the CPU.

    Raises:
      RuntimeError: they could not be computed.
    """
    x, w, dy = _operands()
    options = _options.Options(algorithm="heuristic")  # whatever the environment says
    with jax.default_device(device or jax.devices("cpu")[0]), _options.using(options):
        lowered = jax.jit(_step).lower(x, w, dy)
        found = lowered.compile()(x, w, dy)
    said = []
    calls = lowered.as_text().count(_load.TARGET)
    if device is not None and calls != 3:
        said.append(f"cuDNN computes {calls} of the 3 convolutions")
    for name, array, expected in zip(("y", "dx", "dw"), found, _define(x, w, dy), strict=True):
        differing = int(np.sum(np.asarray(array) != expected))
        if differing:
            said.append(f"{differing} of {expected.size} numbers of {name} are wrong")
    return said


def _operands() -> tuple[np.ndarray, ...]:
    numbers = np.random.default_rng(0)
    shapes = (_X, _W, (_X[0], *_OUT, _W[0]))
    return tuple(numbers.integers(-3, 4, shape).astype(np.float32) for shape in shapes)


def _step(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    y, pullback = jax.vjp(_convolve, x, w)
    return (y, *pullback(dy))


def _convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    return conv_general_dilated(
        x, w, _STRIDES, _PADDING, rhs_dilation=_DILATION, dimension_numbers=_LAYOUT
    )


def _define(x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, ...]:
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    for r in itertools.product(*map(range, _W[1:3])):
        for p in itertools.product(*map(range, _OUT)):
            i, j = (
                s * position + d * tap - low
                for s, position, d, tap, (low, _) in zip(
                    _STRIDES, p, _DILATION, r, _PADDING, strict=True
                )
            )
            if 0 <= i < _X[1] and 0 <= j < _X[2]:
                y[:, *p] += x[:, i, j] @ w[:, *r].T
                dx[:, i, j] += dy[:, *p] @ w[:, *r]
                dw[:, *r] += dy[:, *p].T @ x[:, i, j]
    return y, dx, dw
