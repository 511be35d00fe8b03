# SPDX-License-Identifier: Apache-2.0
"""Whether convolutions with few or odd channels run faster with zero channels added.

    python benchmarks/channel_padding.py --output channels.json

Each pass is computed as it is, and with the input and output channels of each group padded to a
multiple of 8 (16 bits) or 4 (float32), the copies that this takes included. Device time by JAX's
profiler, the least of four turns. It needs a GPU.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from device_time import Program, device_times

import jaxcudnn
from jaxcudnn._spec import ROLES

SPATIAL = {1: (65536,), 2: (128, 128), 3: (32, 32, 32)}


class Layer(NamedTuple):
    """A 3-wide convolution with stride 1, channels last, of 16 images."""

    rank: int
    groups: int
    inputs: int
    outputs: int
    """Channels of each group."""
    dtype: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        size = SPATIAL[self.rank]
        return {
            "x": (16, *size, self.groups * self.inputs),
            "w": (self.groups * self.outputs, *[3] * self.rank, self.inputs),
            "y": (16, *size, self.groups * self.outputs),
        }

    def padded(self) -> "Layer":
        multiple = 4 if self.dtype == "float32" else 8
        inputs, outputs = (-(-n // multiple) * multiple for n in (self.inputs, self.outputs))
        return self._replace(inputs=inputs, outputs=outputs)

    def function(self, op: str) -> Callable[..., jax.Array]:
        positions = "DHW"[-self.rank :]
        options = {"padding": 1, "dimension_numbers": (
            f"N{positions}C", f"O{positions}I", f"N{positions}C"
        )}  # fmt: skip
        size = SPATIAL[self.rank]
        if op == "fprop":
            return lambda x, w: jaxcudnn.conv_fprop(x, w, **options)
        options["groups"] = self.groups
        if op == "dgrad":
            return lambda dy, w: jaxcudnn.conv_dgrad(dy, w, size, **options)
        return lambda x, dy: jaxcudnn.conv_wgrad(x, dy, [3] * self.rank, **options)


def resized(array: jax.Array, role: str, old: Layer, new: Layer) -> jax.Array:
    """Pad the channels of each group with zeros, or cut them off again."""
    sizes = {"x": [(-1, "inputs", True)], "y": [(-1, "outputs", True)],
             "w": [(0, "outputs", True), (-1, "inputs", False)]}[role]  # fmt: skip
    for axis, name, grouped in sizes:
        before, after = getattr(old, name), getattr(new, name)
        groups = old.groups if grouped else 1
        axis %= array.ndim
        shape = array.shape
        array = array.reshape(*shape[:axis], groups, before, *shape[axis + 1 :])
        if after > before:
            array = jnp.pad(array, [(0, after - before if i == axis + 1 else 0)
                                    for i in range(array.ndim)])  # fmt: skip
        else:
            array = jax.lax.slice_in_dim(array, 0, after, axis=axis + 1)
        array = array.reshape(*shape[:axis], groups * after, *shape[axis + 1 :])
    return array


def with_padding(layer: Layer, op: str) -> Callable[..., jax.Array]:
    wide = layer.padded()

    def compute(*arrays: jax.Array) -> jax.Array:
        *roles, result = ROLES[op]
        operands = (resized(a, role, layer, wide) for a, role in zip(arrays, roles, strict=True))
        return resized(wide.function(op)(*operands), result, wide, layer)

    return compute


def layers(quick: bool) -> Iterator[Layer]:
    channels = [(1, 32), (3, 64), (64, 3), (5, 5), (17, 33)]
    for rank, (inputs, outputs), dtype in itertools.product(
        [2] if quick else [1, 2, 3], channels, ["bfloat16", "float32"]
    ):
        yield Layer(rank, 1, inputs, outputs, dtype)
    for rank, dtype in itertools.product([2] if quick else [1, 2, 3], ["bfloat16", "float32"]):
        yield Layer(rank, 4, 3, 5, dtype)
        yield Layer(rank, 8, 17, 17, dtype)


def measure(layer: Layer, op: str) -> Mapping[str, float]:
    draw = np.random.default_rng(0)
    operands = [
        jnp.asarray(draw.standard_normal(layer.shapes()[role], np.float32), layer.dtype)
        for role in ROLES[op][:2]
    ]
    functions = {"as it is": layer.function(op), "padded": with_padding(layer, op)}
    programs = {
        name: Program(partial(jax.jit(function), *operands)) for name, function in functions.items()
    }
    times = device_times(programs, rounds=4, steps=4)
    return {name: time.microseconds for name, time in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="two dimensions alone")
    arguments = parser.parse_args()
    rows = []
    for layer in layers(arguments.quick):
        for op in ROLES:
            row = {**layer._asdict(), "op": op, **measure(layer, op)}
            rows.append(row)
            print(*row.values(), f"{row['as it is'] / row['padded']:.2f}", flush=True)
            arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
