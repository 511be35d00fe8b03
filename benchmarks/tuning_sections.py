# SPDX-License-Identifier: Apache-2.0
"""The sections of `tuning_figures.py`: what each measures, and how."""

import gc
import itertools
import math
import resource
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from convolutions import PASSES, PLANNED, RESNET50, SMALL
from jax import lax
from machines import Machine
from record import Record

import jaxcudnn
from jaxcudnn import Options, _lowering


class Effort(NamedTuple):
    """How often to repeat."""

    layers: int = 15
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    programs: int = 40
    shapes: int = 10_000
    executions: int = 100_000


QUICK = Effort(layers=1, dtypes=("bfloat16",), programs=2, shapes=20, executions=200)


def tuning(machine: Machine, record: Record, effort: Effort) -> None:
    """Measure the plans of 15 layers, three passes, within the budget and exhaustively.

    A plan's time is the least of those that either race found, so that a race which ran it once
    only does not make it look slow.
    """
    rows = []
    for dtype in effort.dtypes:
        for conv in map(machine.scaled, [*RESNET50, *PLANNED][: effort.layers]):
            for op in PASSES:
                with record.attempt(f"{conv.name} {op} {dtype}"):
                    spec = conv.spec(dtype)
                    bounded = machine.tune(_attributes(op, spec, Options()))
                    free = Options(algorithm="exhaustive", allow_runtime_compilation=False)
                    everything = machine.tune(_attributes(op, spec, free))
                    rows.append(
                        {
                            "layer": conv.name,
                            "op": op,
                            "dtype": dtype,
                            "plan": bounded.plan.name,
                            "ms": bounded.milliseconds,
                            "tried": bounded.plan.tried,
                            "exhaustive_ms": everything.milliseconds,
                            **_compared(bounded, everything),
                        }
                    )
                    record.row(**rows[-1])
                    print(f"  {rows[-1]}", flush=True)
    budget = Options().tuning_budget.milliseconds
    record.figures(
        budget_ms=budget,
        median_ms=statistics.median(row["ms"] for row in rows),
        most_ms=max(row["ms"] for row in rows),
        worst_ratio={
            dtype: max(row["ratio"] for row in rows if row["dtype"] == dtype)
            for dtype in effort.dtypes
        },
    )


def _attributes(op: str, spec: Any, options: Options) -> dict[str, Any]:
    return _lowering._attributes(op, replace(spec, options=options))


def _compared(bounded: Any, everything: Any) -> dict[str, float]:
    """Give the time of the plan chosen within the budget, and over that of the fastest of all."""
    times: dict[str, float] = {}
    for timing in (*bounded.timings, *everything.timings):
        if not math.isnan(timing.microseconds):
            known = times.get(timing.name, math.inf)
            times[timing.name] = min(known, timing.microseconds)
    us = times[bounded.plan.name]
    return {"us": us, "ratio": us / min(times.values())}


def lookups(machine: Machine, record: Record, effort: Effort) -> None:
    """Time Initialize of programs whose plan the process knows, in their first run and later."""
    conv = machine.scaled(SMALL)
    shapes = conv.shapes()
    x, w = (jnp.ones(shapes[role], jnp.bfloat16) for role in "xw")
    layer = conv.function("fprop", jaxcudnn.conv_general_dilated, "bfloat16")
    jax.block_until_ready(jax.jit(layer)(x, w))
    firsts, others = [], []
    for _ in range(effort.programs):
        program = jax.jit(lambda x, w: layer(x, w)).lower(x, w).compile()

        def runs(program: jax.stages.Compiled = program) -> None:
            for _ in range(5):
                jax.block_until_ready(program(x, w))

        first, *later = machine.stage_samples(runs)["initialize"]
        firsts.append(first)
        others += later
    record.figures(
        first_ns=statistics.median(firsts),
        median_ns=statistics.median(others),
        programs=len(firsts),
    )
    print(f"  {record.values}", flush=True)


def memory(machine: Machine, record: Record, effort: Effort) -> None:
    """Watch the process's memory over many shapes, and over many executions of one program."""
    start = _resident()
    conv = machine.scaled(SMALL)
    for i in range(effort.shapes):
        spec = replace(conv.spec("bfloat16"), x_shape=(1 + i // 100, conv.c, 8 + i % 100, 9))
        machine.plan(_attributes("fprop", spec, Options(algorithm="heuristic")))
    grown = _resident() - start
    shapes = conv.shapes()
    x, w = (jnp.ones(shapes[role], jnp.bfloat16) for role in "xw")
    layer = conv.function("fprop", jaxcudnn.conv_general_dilated, "bfloat16")
    per_call = 100

    @jax.jit
    def repeated(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, per_call, lambda _, x: layer(x, w), x)

    sizes = []
    for _ in range(3):  # in the first, allocators get what they keep
        for _ in range(effort.executions // per_call):
            jax.block_until_ready(repeated(x, w))
        gc.collect()
        sizes.append(_resident())
    record.figures(
        shapes=effort.shapes,
        shapes_mib=grown / 2**20,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        kept=machine.plans_kept(),
        executions=effort.executions,
        executions_kib=[(b - a) / 2**10 for a, b in itertools.pairwise(sizes)],
    )
    print(f"  {record.values}", flush=True)


def _resident() -> int:
    """Give the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


SECTIONS: dict[str, Callable[[Machine, Record, Effort], None]] = {
    "tuning": tuning,
    "lookups": lookups,
    "memory": memory,
}
