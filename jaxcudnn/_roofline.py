# SPDX-License-Identifier: Apache-2.0
"""The least time that a GPU can need for a convolution, from rates measured on it.

That is the longer of two: for its products, at the rate of a matrix product in the same dtype, and
for reading and writing its arrays once, at the rate of a copy. Products with padding do not count,
nor positions of x that no window reaches.
"""

import math
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._spec import ROLES, ConvSpec

MATMUL_SIZES = {2: 8192, 4: 4096, 8: 2048}
"""Rows and columns of the matrices, by the bytes of a number."""
COPY_BYTES = 256 << 20
"""Of the array that is copied: several times what caches hold."""
SECONDS = 0.02
"""How long launches run, together, that are timed from the host."""
_REPETITIONS = 3


def floor_microseconds(op: str, spec: ConvSpec, attributes: Mapping[str, Any]) -> float | None:
    """Give the least time, in microseconds, for what one custom call computes.

    None if the GPU has no memory left for the arrays with which rates are measured.
    """
    dtype = attributes["dtype"]
    flops, elements = work(op, spec)
    if attributes["residual"]:  # of the size of the result
        elements += math.prod(spec.shape(ROLES[op][2]))
    try:
        arithmetic = flops / matmul_rate(dtype, attributes["allow_tf32"])
        return 1e6 * max(arithmetic, elements * jnp.dtype(dtype).itemsize / copy_rate())
    except jax.errors.JaxRuntimeError:
        return None


def work(op: str, spec: ConvSpec) -> tuple[int, int]:
    """Give a convolution's additions and multiplications, and the elements to read and write."""
    taps, reached = 1, 1
    per_dimension = zip(
        spec.x_shape[2:], spec.w_shape[2:], spec.y_shape[2:], spec.strides, spec.dilation,
        spec.padding, strict=True,
    )  # fmt: skip
    for size, window, out, stride, dilation, (low, _) in per_dimension:
        pairs = sum(
            _count_reached(size, out, stride, low - dilation * tap) for tap in range(window)
        )
        taps *= pairs
        reached *= min(size, pairs)
    images, channels, *positions = spec.x_shape
    x = images * channels * (math.prod(positions) if op == "dgrad" else reached)
    elements = x + math.prod(spec.w_shape) + math.prod(spec.y_shape)
    return 2 * images * math.prod(spec.w_shape[:2]) * taps, elements


def _count_reached(size: int, out: int, stride: int, before: int) -> int:
    """Count the outputs p < out with 0 <= stride p - before < size."""
    first = max(0, -(-before // stride))
    last = min(out - 1, (size - 1 + before) // stride)
    return max(0, last - first + 1)


@lru_cache
def matmul_rate(dtype: str, allow_tf32: bool) -> float:
    """Give additions and multiplications a second in a product of large matrices.

    float32 is rounded to TF32 if that is allowed, as for the convolution.
    """
    size = MATMUL_SIZES[jnp.dtype(dtype).itemsize]
    precision = lax.Precision.DEFAULT if allow_tf32 else lax.Precision.HIGHEST
    with jax.enable_x64(dtype == "float64"), jax.default_device(_device()):
        a = jnp.ones((size, size), dtype)
        multiply = jax.jit(lambda a: lax.dot(a, a, precision=precision))
        return 2 * size**3 / _seconds(lambda: multiply(a))


@lru_cache
def copy_rate() -> float:
    """Give the bytes a second that a large copy reads and writes, taken together."""
    with jax.default_device(_device()):
        array = jnp.ones(COPY_BYTES // 4, jnp.float32)
        copy = jax.jit(lambda array: array + 1)
        return 2 * array.nbytes / _seconds(lambda: copy(array))


def _device() -> Any:
    return jax.local_devices(backend="cuda")[0]


def _seconds(launch: Callable[[], jax.Array]) -> float:
    """Give the seconds of one launch, among so many in a row that the host's part is hidden."""
    jax.block_until_ready(launch())

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count - 1):
            launch()
        jax.block_until_ready(launch())
        return time.perf_counter() - start

    count = 1
    while (seconds := run(count)) < SECONDS:
        count *= 2
    return min(seconds, *(run(count) for _ in range(_REPETITIONS - 1))) / count
