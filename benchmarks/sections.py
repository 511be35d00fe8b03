# SPDX-License-Identifier: Apache-2.0
"""The sections of `conv_figures.py`: what each measures, and how."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from convolutions import HEADLINES, PASSES, PLANNED, RESNET50, SMALL, Conv, RandomData, chain
from device_time import Program, StepTime, fastest, kernel_rows
from effort import Effort
from fused import fused
from jax import lax
from machines import Machine
from record import Record

import jaxcudnn
from jaxcudnn import Options, _lowering, _reference

LAX_SECONDS = 75
"""How long XLA may compile and tune `lax` convolutions in the section of layers, where they are
only for context; the layers after that go without."""

NO_COMMAND_BUFFER = {"xla_gpu_graph_min_graph_size": 1_000_000}
"""Has XLA call the handlers in every step, instead of replaying a recording of what they did."""


def layers(machine: Machine, record: Record, effort: Effort) -> None:
    """Time ten layers of ResNet-50 on the GPU, three passes, in bfloat16 and in TF32.

    jaxcudnn's jitted call, by no route, cuDNN's Python frontend with the same plan and, in
    bfloat16, `lax` take turns under one profiler. Beside the times it notes whether both callers of
    cuDNN launched the same kernels and computed the same bits.
    """
    lax_seconds = 0.0
    for dtype in ("bfloat16", "float32"):
        data = RandomData(dtype)
        for conv in map(machine.scaled, RESNET50[: effort.layers]):
            for op in PASSES:
                with record.attempt(f"{conv.name} {op} {dtype}"):
                    bench = Bench(machine, record, conv, op, dtype, data, routes=False)
                    bench.add_frontend()
                    if dtype == "bfloat16" and lax_seconds < LAX_SECONDS:
                        lax_seconds += bench.add_lax()
                    bench.measure(effort)


def headline(machine: Machine, record: Record, effort: Effort) -> None:
    """Time gradients that XLA computes in a roundabout way, against `lax`."""
    data = RandomData("bfloat16")
    for conv, op in HEADLINES:
        with record.attempt(f"{conv.name} {op}"):
            scaled = machine.scaled(conv)
            bench = Bench(machine, record, scaled, op, "bfloat16", data, routes=True)
            bench.add_lax()
            bench.measure(effort)


def host(machine: Machine, record: Record, effort: Effort) -> None:
    """Time jaxcudnn's handlers on the host, in chains of small convolutions that are not recorded.

    One is of convolutions alone, one of convolutions with bias, residual and ReLU. Our share of
    Execute is all but cuDNN's own enqueue. The handlers read a clock twice for either, so the share
    includes the cost of two readings.
    """
    conv, layers = machine.scaled(SMALL), effort.chain_layers
    bare = chain_program(conv, layers, jaxcudnn.conv_general_dilated, relu=False, replay=False)
    record.figures(**handler_figures(machine, effort, *bare))
    for name, value in handler_figures(machine, effort, *fused_chain(conv, layers)).items():
        record.figures(**{f"fused_{name}": value})


def handler_figures(
    machine: Machine, effort: Effort, step: Callable[..., jax.Array], *operands: Any
) -> dict[str, float]:
    """Give medians, 90th percentiles and our share of what the handlers take, in nanoseconds."""
    for _ in range(3):
        jax.block_until_ready(step(*operands))

    def run() -> None:
        out = None
        for _ in range(effort.host_steps):
            out = step(*operands)
        jax.block_until_ready(out)

    samples = machine.stage_samples(run)
    medians = {f"{stage}_ns": statistics.median(values) for stage, values in samples.items()}
    return {
        "calls": len(samples["execute"]),
        **medians,
        "share_ns": medians["execute_ns"] - medians["enqueue_ns"],
        **percentiles(samples),
    }


def percentiles(samples: Any) -> dict[str, float]:
    """Give the 90th percentile of each stage, in nanoseconds."""
    return {
        f"{stage}_p90_ns": statistics.quantiles(values, n=10)[-1]
        for stage, values in samples.items()
        if len(values) > 1
    }


def small_chain(machine: Machine, record: Record, effort: Effort) -> None:
    """Time a chain of twenty small convolutions with ReLU on the wall clock, against `lax`.

    Streamed means that steps are enqueued one after another and waited for once; the latency is
    that of steps waited for one by one. Both programs are compiled with XLA's default flags.
    """
    implementations = {
        "jaxcudnn": jaxcudnn.conv_general_dilated,
        "lax": lax.conv_general_dilated,
    }
    programs = {}
    for label, convolve in implementations.items():
        step, x, filters = chain_program(
            machine.scaled(SMALL), effort.chain_layers, convolve, relu=True, replay=True
        )
        programs[label] = lambda step=step, x=x, filters=filters: step(x, filters)
        for _ in range(5):  # the first compiles, the second records
            jax.block_until_ready(programs[label]())
    walls: dict[str, dict[str, list[float]]] = {}
    for _ in range(effort.chain_repeats):
        for label, step in programs.items():
            for kind, each in (("streamed", False), ("latency", True)):
                wall = wall_time(step, effort.chain_steps, wait_each=each)
                walls.setdefault(kind, {}).setdefault(label, []).append(wall)
    for kind, by_label in walls.items():
        medians = {label: statistics.median(values) for label, values in by_label.items()}
        ratio = medians["jaxcudnn"] / medians["lax"]
        record.row(kind=kind, us=medians, ratio=ratio, samples=by_label)
        print(f"  {kind}: {medians}, ratio {ratio:.3f}", flush=True)


def plans(machine: Machine, record: Record, effort: Effort) -> None:
    """Time building and choosing plans for convolutions that the process has not met yet.

    The first loads cuDNN's libraries and is counted apart.
    """
    milliseconds = []
    for conv in PLANNED:
        for op in PASSES:
            with record.attempt(f"{conv.name} {op}"):
                with jaxcudnn.options(algorithm="heuristic"):
                    attributes = _lowering._attributes(op, conv.spec("bfloat16"))
                start = time.perf_counter()
                plan = machine.plan(attributes)
                milliseconds.append((time.perf_counter() - start) * 1e3)
                record.row(layer=conv.name, op=op, plan=plan.name, ms=milliseconds[-1])
    first, *later = milliseconds
    record.figures(
        first_ms=first, median_ms=statistics.median(later), max_ms=max(later), plans=len(later)
    )


SECTIONS: dict[str, Callable[[Machine, Record, Effort], None]] = {
    "plans": plans,
    "host": host,
    "chain": small_chain,
    "layers": layers,
    "headline": headline,
    "fused": fused,
}


class Bench:
    """One pass of one convolution, computed by several programs from the same operands."""

    def __init__(
        self, machine: Machine, record: Record, conv: Conv, op: str, dtype: str, data: RandomData,
        *, routes: bool,
    ) -> None:  # fmt: skip
        """Compute it once through jaxcudnn, by a route if there is one and `routes` says so."""
        self._machine, self._record = machine, record
        self._conv, self._op, self._dtype = conv, op, dtype
        shapes = conv.shapes()
        self._operands = [
            data.draw(shapes[role], offset=7 * i) for i, role in enumerate(PASSES[op])
        ]
        self._programs: dict[str, Program] = {}
        self._bit_equal: bool | None = None
        chosen = Options(routes=routes)
        convolve = partial(jaxcudnn.conv_general_dilated, options=chosen)
        self._result, _ = self._add("jaxcudnn", convolve)
        built = machine.plans_built()
        spec = replace(conv.spec(dtype), options=chosen)
        (call,) = _lowering.steps(op, getattr(_reference, op), spec=spec, layout=conv.layout)
        self._attributes, self._route = call.attributes, call.route
        self._plan = machine.plan(self._attributes) if self._attributes else None
        if machine.plans_built() != built:
            raise RuntimeError("the call used another plan than the one that is looked up here")

    def add_frontend(self) -> None:
        """Add the same plan executed by cuDNN's frontend, and compare its result bit by bit."""
        with self._record.attempt(f"{self._conv.name} {self._op} {self._dtype}, cuDNN's frontend"):
            assert self._attributes and self._plan
            program = self._machine.frontend(
                self._attributes, self._plan.name, self._operands, self._result
            )
            out = program.step()
            program.wait(out)
            self._bit_equal = bool(jnp.array_equal(out, self._result))
            self._programs["frontend"] = program

    def add_lax(self) -> float:
        """Add XLA's own convolution, and give the seconds that compiling and tuning it took."""
        seconds = 0.0
        with self._record.attempt(f"{self._conv.name} {self._op} {self._dtype}, lax"):
            _, seconds = self._add("lax", lax.conv_general_dilated)
        return seconds

    def measure(self, effort: Effort) -> None:
        """Time all programs in turns, at two places in memory, and record a row.

        Where its operands lie can change a kernel's time by a quarter, whoever launches it.
        """
        here = self._device_times(effort)
        elsewhere = self._operands
        self._operands = [jnp.copy(operand) for operand in elsewhere]
        if "frontend" in self._programs:
            self.add_frontend()
        there = self._device_times(effort)
        del elsewhere
        times = {label: fastest((here[label], there[label])) for label in here}
        ours, peer = times["jaxcudnn"], times.get("frontend")
        us = {label: time.microseconds for label, time in times.items()}
        self._record.row(
            layer=self._conv.name,
            op=self._op,
            dtype=self._dtype,
            plan=self._plan.name if self._plan else self._route,
            workspace=self._plan.workspace_size if self._plan else 0,
            us=us,
            ratio=peer and us["jaxcudnn"] / us["frontend"],
            bit_equal=self._bit_equal,
            kernels_beside=peer and ours.beside(peer),
            kernels={label: kernel_rows(time) for label, time in times.items()},
        )
        line = ", ".join(f"{label} {value:.1f}" for label, value in us.items())
        print(f"  {self._conv.name} {self._op} {self._dtype}: us {line}", flush=True)

    def _device_times(self, effort: Effort) -> dict[str, StepTime]:
        return self._machine.device_times(self._programs, rounds=effort.rounds, steps=effort.steps)

    def _add(self, label: str, convolve: Callable[..., jax.Array]) -> tuple[jax.Array, float]:
        step = jax.jit(self._conv.function(self._op, convolve, self._dtype))
        start = time.perf_counter()
        result = jax.block_until_ready(step(*self._operands))
        seconds = time.perf_counter() - start
        self._programs[label] = Program(lambda: step(*self._operands))
        return result, seconds


def chain_program(
    conv: Conv, layers: int, convolve: Callable[..., jax.Array], *, relu: bool, replay: bool
) -> tuple[Callable[..., jax.Array], jax.Array, list[jax.Array]]:
    """Give the compiled chain, an image and its filters, drawn so that values keep their size."""
    shapes, key = conv.shapes(), jax.random.key(0)
    x = jax.random.normal(key, shapes["x"], jnp.bfloat16)
    scale = (2.0 if relu else 1.0) / (conv.c * conv.window**2)
    filters = [
        jax.random.normal(subkey, shapes["w"], jnp.bfloat16) * jnp.bfloat16(scale**0.5)
        for subkey in jax.random.split(key, layers)
    ]
    step = jax.jit(chain(conv, convolve, relu=relu), compiler_options=options(replay=replay))
    return step, x, filters


def options(*, replay: bool) -> dict[str, Any] | None:
    """Give the compiler's options by which XLA replays what handlers did, or calls them again."""
    return None if replay or jax.default_backend() != "gpu" else NO_COMMAND_BUFFER


def fused_chain(
    conv: Conv, layers: int
) -> tuple[Callable[..., jax.Array], jax.Array, list[jax.Array], jax.Array]:
    """Give a compiled chain whose layers have a bias, and their input as the residual."""

    def apply(x: jax.Array, filters: list[jax.Array], bias: jax.Array) -> jax.Array:
        for w in filters:
            x = conv.with_epilogue(x, w, bias, x)
        return x

    _, x, filters = chain_program(conv, layers, lax.conv_general_dilated, relu=True, replay=False)
    step = jax.jit(apply, compiler_options=options(replay=False))
    return step, x, filters, jnp.zeros(conv.k, jnp.bfloat16)


def wall_time(step: Callable[[], Any], steps: int, *, wait_each: bool) -> float:
    """Give the microseconds of a step, averaged over `steps` of them."""
    out = None
    start = time.perf_counter()
    for _ in range(steps):
        out = step()
        if wait_each:
            jax.block_until_ready(out)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / steps * 1e6
