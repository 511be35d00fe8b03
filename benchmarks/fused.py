# SPDX-License-Identifier: Apache-2.0
"""Layers with bias, residual and ReLU: by one call of cuDNN, without them, and by XLA."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from convolutions import RESNET50, Conv, RandomData
from device_time import Program, fastest, kernel_rows
from effort import Effort
from jax import lax
from machines import Machine
from record import Record

import jaxcudnn

LAX_SECONDS = 150
"""How long XLA may compile and tune; the layers after that go without."""

Programs = dict[str, Callable[..., jax.Array]]


def fused(machine: Machine, record: Record, effort: Effort) -> None:
    """Time ten layers of ResNet-50 in bfloat16 on the GPU, and as much of them at a time.

    The convolution alone, the same with bias and ReLU and with a residual, too, and XLA's of both
    take turns within one trace, with their operands at two places in memory.
    """
    data, lax_seconds = RandomData("bfloat16"), 0.0
    for conv in map(machine.scaled, RESNET50[: effort.layers]):
        with record.attempt(conv.name):
            operands = draw(conv, data)
            programs = {label: jax.jit(f) for label, f in by_jaxcudnn(conv).items()}
            for program in programs.values():
                jax.block_until_ready(program(*operands))
            if lax_seconds < LAX_SECONDS:
                start = time.perf_counter()
                for label, f in by_lax(conv).items():
                    programs[label] = jax.jit(f)
                    jax.block_until_ready(programs[label](*operands))
                lax_seconds += time.perf_counter() - start
            times = device_times(machine, programs, operands, effort)
            us = {label: time.microseconds for label, time in times.items()}
            record.row(
                layer=conv.name,
                us=us,
                ratio=us["bias"] / us["conv"],
                residual_ratio=us["residual"] / us["conv"],
                lax_ratios=[
                    us[label] / us[f"lax {label}"]
                    for label in ("bias", "residual")
                    if f"lax {label}" in us
                ],
                calls={label: explained(f, operands) for label, f in by_jaxcudnn(conv).items()},
                kernels={label: kernel_rows(time) for label, time in times.items()},
            )
            line = ", ".join(f"{label} {value:.1f}" for label, value in us.items())
            print(f"  {conv.name}: us {line}", flush=True)


def draw(conv: Conv, data: RandomData) -> list[jax.Array]:
    """Give image, filter, bias and residual."""
    shapes = conv.shapes()
    wanted = (shapes["x"], shapes["w"], (conv.k,), shapes["y"])
    return [data.draw(shape, offset=7 * i) for i, shape in enumerate(wanted)]


def by_jaxcudnn(conv: Conv) -> Programs:
    """Give the convolution alone, with bias and ReLU, and with a residual as well."""
    return {
        "conv": lambda x, w, b, r: jaxcudnn.conv_general_dilated(x, w, **conv.geometry),
        "bias": lambda x, w, b, r: conv.with_epilogue(x, w, b),
        "residual": lambda x, w, b, r: conv.with_epilogue(x, w, b, r),
    }


def by_lax(conv: Conv) -> Programs:
    """Give the last two as users of `lax` write them."""

    def conv_and_bias(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, w, **conv.geometry)
        return y + jnp.expand_dims(b, range(y.ndim - 1))

    return {
        "lax bias": lambda x, w, b, r: jax.nn.relu(conv_and_bias(x, w, b)),
        "lax residual": lambda x, w, b, r: jax.nn.relu(conv_and_bias(x, w, b) + r),
    }


def device_times(machine: Machine, programs: Programs, operands: Any, effort: Effort) -> Any:
    """Time programs in turns, with their operands at two places in memory; the faster counts."""
    placed = {"here": operands, "there": [jnp.copy(operand) for operand in operands]}
    turns = {
        f"{place} {label}": Program(lambda f=f, arrays=arrays: f(*arrays))
        for place, arrays in placed.items()
        for label, f in programs.items()
    }
    times = machine.device_times(turns, rounds=effort.rounds, steps=effort.steps)
    return {label: fastest(times[f"{place} {label}"] for place in placed) for label in programs}


def explained(f: Callable[..., jax.Array], operands: list[jax.Array]) -> dict[str, Any]:
    """Say which plan computes a layer, and why it leaves the rest to XLA, if it does."""
    (row,) = jaxcudnn.explain(f)(*operands)
    return {"plan": row.plan, "workspace": row.workspace, "unfused": row.unfused}
