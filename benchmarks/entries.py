# SPDX-License-Identifier: Apache-2.0
"""One convolution, all passes: what jaxcudnn makes of it, how long it takes, how far it is off."""

import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from device_time import Program, StepTime, fastest, kernel_rows
from jax import lax
from machines import Machine
from record import Record
from watch import Progress

import jaxcudnn
from jaxcudnn import _load, _routes

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import sampled
from aot import parse_attributes
from reported import Reported
from tolerance import bound

SEED = 7

LAX_SECONDS = 10
"""How long XLA may take to compile and tune one pass of `lax`, and to run it once."""

SECONDS = 60
"""The same for anything else."""


class Effort(NamedTuple):
    """How often to repeat."""

    rounds: int = 2
    """Turns at each of two places in memory."""
    steps: int = 12
    turn_seconds: float = 0.05
    """A turn has fewer steps if it would take longer."""


QUICK = Effort(rounds=1, steps=2)


class Measurement:
    """One convolution: its operands, its programs and the rows that are to be recorded."""

    def __init__(
        self, machine: Machine, progress: Progress, name: str, reported: Reported, effort: Effort
    ) -> None:
        """Begin with rows that say what is measured."""
        self._machine, self._progress, self._effort = machine, progress, effort
        self._name, self._reported = name, reported
        self._arrays: dict[str, jax.Array] = {}
        self._programs: dict[str, dict[str, Callable[..., jax.Array]]] = {
            which: {} for which in reported.passes
        }
        self._seconds: dict[str, dict[str, float]] = {which: {} for which in reported.passes}
        self.failures: list[str] = []
        self.rows: dict[str, dict[str, Any]] = {
            which: {
                "entry": name,
                "what": str(reported),
                "pass": which,
                "transposed": reported.transposed,
                "strided": reported.strided,
                "us": {},
            }
            for which in reported.passes
        }

    def run(self, *, with_lax: bool = True) -> None:
        """Measure what can be measured."""
        self._attempt("operands", self._fill)
        if not self._arrays:
            return
        self._run_jaxcudnn()
        if self._reported.case.n == 0:
            return  # nothing runs on the device
        for which in self._reported.passes if with_lax else ():
            self._add_lax(which)
        # Slow programs take turns of a pass alone, lest they cost the others their steps.
        seconds = [s for by_label in self._seconds.values() for s in by_label.values()]
        together = max(seconds, default=0) * self._effort.steps < self._effort.turn_seconds
        passes = [which for which in self._reported.passes if self._programs[which]]
        for group in [passes] if together else [[which] for which in passes]:
            self._attempt(f"time {' '.join(group)}", lambda group=group: self._time(group))

    def _run_jaxcudnn(self) -> None:
        """Compile jaxcudnn's programs, run them and check their results."""
        results: dict[str, jax.Array] = {}
        # One after another: XLA tunes what it compiles on the GPU, where plans are being timed.
        for which in self._reported.passes:

            def start(which: str = which) -> None:
                results[which] = self._start(which, "jaxcudnn", self._compile(which))

            self._attempt(f"jaxcudnn {which}", start)
        self._attempt("check", lambda: self._check(results))

    def _attempt(self, stage: str, action: Callable[[], Any]) -> Any:
        """Do something; note an exception where it belongs, and go on without a result."""
        try:
            with self._progress.stage(self._name, stage, SECONDS):
                return action()
        except Exception as error:
            traceback.print_exc()
            text = f"{stage}: {type(error).__name__}: {error}"[:1000]
            self.failures.append(f"{self._name}, {text}")
            named = [which for which in self.rows if which in stage.split()]
            for which in named or self.rows:
                self.rows[which].setdefault("failure", text)

    def _fill(self) -> None:
        reported, numbers = self._reported, self._numbers

        @jax.jit
        def fill(seed: jax.Array) -> dict[str, jax.Array]:
            return {
                role: numbers.fill(reported.case, role, reported.dtype_of(role), seed)
                for role in "xwy"
            }

        self._arrays = jax.block_until_ready(fill(jnp.uint32(SEED)))

    @property
    def _numbers(self) -> sampled.Numbers:
        """Reals, except in 8 bits, where a gradient would be rounded to whole numbers at best."""
        eight_bits = jnp.dtype(self._reported.dtype).itemsize == 1
        return sampled.INTEGERS if eight_bits else sampled.REALS

    def _operands(self, which: str, arrays: Mapping[str, jax.Array]) -> list[jax.Array]:
        return [arrays[role] for role in self._reported.roles(which)[:2]]

    def _compile(self, which: str) -> Callable[..., jax.Array]:
        """Compile jaxcudnn's program, and note what it consists of."""
        function = self._reported.function(which, jaxcudnn.conv_general_dilated)
        traced = jax.jit(function).trace(*self._operands(which, self._arrays))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        calls = custom_calls(text)
        plans = [self._machine.plan(attributes) for attributes in calls]
        explained = jaxcudnn.explain(function)(*self._operands(which, self._arrays))
        routes = dict.fromkeys(row.route for row in explained if row.route in _routes.KINDS)
        self.rows[which] |= {
            "route": ", ".join(routes) or route(text),
            "reading": ", ".join(dict.fromkeys(map(reading, calls))),
            "plan": ", ".join(dict.fromkeys(plan.name for plan in plans)),
            "workspace": max((plan.workspace_size for plan in plans), default=0),
        }
        return traced.lower().compile()

    def _start(self, which: str, label: str, program: Callable[..., jax.Array]) -> jax.Array:
        """Run a program twice, the second time by the clock, and give its result."""
        operands = self._operands(which, self._arrays)
        jax.block_until_ready(program(*operands))
        start = time.perf_counter()
        result = jax.block_until_ready(program(*operands))
        self._seconds[which][label] = time.perf_counter() - start
        self._programs[which][label] = program
        return result

    def _add_lax(self, which: str) -> None:
        """Add XLA's own program; what it cannot do is noted, and no failure of ours."""
        row, operands = self.rows[which], self._operands(which, self._arrays)
        start = time.perf_counter()
        try:
            with self._progress.stage(self._name, f"lax {which}", LAX_SECONDS):
                function = self._reported.function(which, lax.conv_general_dilated)
                compiled = jax.jit(function).lower(*operands).compile()
                self._start(which, "lax", compiled)
        except Exception as error:
            row["note"] = f"lax: {str(error).splitlines()[0][:200]}"
            return
        calls = convolutions(compiled.as_text() or "")
        row["lax_seconds"] = round(time.perf_counter() - start, 2)
        row["lax_call"] = ", ".join(map(str, calls))
        row["missed"] = any(misses(call, self._reported, which) for call in calls)

    def _time(self, passes: list[str]) -> None:
        """Time the programs of some passes in turns, with their operands at two places."""
        effort = self._effort
        elsewhere = jax.block_until_ready({role: jnp.copy(a) for role, a in self._arrays.items()})
        programs: dict[str, Program] = {}
        for place, arrays in (("here", self._arrays), ("there", elsewhere)):
            for which in passes:
                operands = self._operands(which, arrays)
                for label, program in self._programs[which].items():
                    programs[f"{place} {label} {which}"] = Program(
                        lambda program=program, operands=operands: program(*operands)
                    )
        slowest = max((s for which in passes for s in self._seconds[which].values()), default=0)
        steps = max(1, min(effort.steps, int(effort.turn_seconds / max(slowest, 1e-9))))
        times = self._machine.device_times(programs, rounds=effort.rounds, steps=steps)
        for which in passes:
            least: dict[str, StepTime] = {
                label: fastest(times[f"{place} {label} {which}"] for place in ("here", "there"))
                for label in self._programs[which]
            }
            row = self.rows[which]
            row["us"] = {label: step.microseconds for label, step in least.items()}
            row["kernels"] = {label: kernel_rows(step) for label, step in least.items()}
            if "lax" in least and "jaxcudnn" in least:
                row["ratio"] = row["us"]["jaxcudnn"] / row["us"]["lax"]

    def _check(self, results: Mapping[str, jax.Array]) -> None:
        """Compare drawn elements with the definition in float64."""
        reported, case = self._reported, self._reported.case
        dtypes = {role: reported.dtype_of(role) for role in "xwy"}
        roles = {which: reported.roles(which)[2] for which in results}
        points = {which: sampled.draw_points(case, role) for which, role in roles.items()}

        @jax.jit
        def take(results, points):
            return {w: sampled.take(results[w], case, roles[w], points[w]) for w in results}

        for which, computed in take(dict(results), points).items():
            role = roles[which]
            exact, magnitude = sampled.compute(
                role,
                case,
                points[which],
                self._numbers,
                dtypes,
                seed=SEED,
                flip=reported.transposed,
            )
            error = np.abs(np.asarray(computed, np.float64) - exact)
            allowed = np.zeros_like(exact)
            if jnp.issubdtype(dtypes[role], jnp.floating):
                tf32 = reported.dtype == "float32"
                allowed = bound(
                    exact, magnitude, dtype=dtypes[role], length=case.lengths[role], tf32=tf32
                )
            wrong = int(np.sum(~(error <= allowed)))
            largest = np.max(np.abs(exact), initial=0)
            self.rows[which] |= {
                "error": float(np.max(error, initial=0) / largest) if largest else 0.0,
                "points": len(exact),
            }
            if wrong:
                text = f"{wrong} of {len(exact)} drawn elements are wrong"
                self.rows[which].setdefault("failure", text)
                self.failures.append(f"{self._name} {which}: {text}")


def custom_calls(text: str) -> list[dict[str, Any]]:
    """Give the attributes of jaxcudnn's custom calls in a lowered program."""
    lines = text.splitlines()
    return [parse_attributes(line) for line in lines if f"custom_call @{_load.TARGET}(" in line]


def route(text: str) -> str:
    """Say what computes a lowered program: cuDNN, `lax`, both, or neither."""
    found = {"cudnn": f"custom_call @{_load.TARGET}(", "lax": "stablehlo.convolution"}
    return " and ".join(name for name, mark in found.items() if mark in text) or "neither"


def reading(attributes: Mapping[str, Any]) -> str:
    """Name the operation and its window, as `dgrad 16x16/16`."""
    window, stride, dilation = (attributes[key] for key in ("w", "stride", "dilation"))
    text = f"{attributes['op']} {'x'.join(map(str, window[2:]))}"
    for mark, numbers in (("/", stride), ("d", dilation)):
        if max(numbers) > 1:
            text += mark + "x".join(map(str, dict.fromkeys(numbers)))
    return text


class Convolution(NamedTuple):
    """A convolution in a program that XLA has compiled."""

    operation: str
    """cuDNN's, such as BackwardInput, if XLA has chosen one."""
    window: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.operation} {'x'.join(map(str, self.window))}".strip()


def convolutions(text: str) -> list[Convolution]:
    """Find the convolutions of a compiled program."""
    found = []
    for line in text.splitlines():
        operation = re.search(r"__cudnn\$conv(\w+)", line)
        if operation or " convolution(" in line:
            sizes = re.search(r"window=\{size=(\d+(?:x\d+)*)", line)
            window = tuple(map(int, sizes[1].split("x"))) if sizes else ()
            found.append(Convolution(operation[1] if operation else "", window))
    return found


def misses(call: Convolution, reported: Reported, which: str) -> bool:
    """Whether XLA takes another array for the window, or spreads one out because of a stride."""
    expected = {"y": "Forward", "x": "BackwardInput", "w": "BackwardFilter"}
    if without_ones(call.window) != without_ones(reported.case.window):
        return True
    operation = expected[reported.roles(which)[2]]
    return reported.strided and bool(call.operation) and operation not in call.operation


def without_ones(window: Sequence[int]) -> list[int]:
    """Give a window's sizes whatever the order and number of its dimensions."""
    return sorted(size for size in window if size > 1)


def line(row: Mapping[str, Any]) -> str:
    """Say a row in a few words."""
    us = ", ".join(f"{label} {value:.1f}" for label, value in row["us"].items())
    notes = [row[key] for key in ("failure", "note") if key in row]
    return f"  {row['entry']} {row['pass']}: us {us or 'none'}; {'; '.join(notes)}".rstrip("; ")


def record_rows(record: Record, measurement: Measurement) -> None:
    """Write the rows to the file, and tell them."""
    for row in measurement.rows.values():
        record.row(**json.loads(json.dumps(row)))
        print(line(row), flush=True)
    for text in measurement.failures:
        record.failure(text)
