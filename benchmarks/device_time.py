# SPDX-License-Identifier: Apache-2.0
"""How long a program's kernels run on the GPU, by JAX's profiler.

The profiler sees every kernel of the process, whoever launched it, so that programs of different
libraries are timed by one clock, in turns, within one trace. What is reported is the time inside
kernels (and memsets and copies on the device); gaps between them are the host's and do not count.
"""

import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from step_times import Event

PAUSE = 10e-3
"""Seconds without work between two programs' turns; half as long a gap separates them again."""

ATTEMPTS = 3
"""Traces to take before giving up: the host can stall for as long as a pause."""


class Program(NamedTuple):
    """Something that enqueues one step of work on the GPU, and the way to wait for its result."""

    step: Callable[[], Any]
    wait: Callable[[Any], object] = jax.block_until_ready


class Kernel(NamedTuple):
    """All visits of one name."""

    name: str
    per_step: float
    """Visits in each step."""
    microseconds: float
    """The median duration of one."""


class StepTime(NamedTuple):
    """What one step of a program does on the GPU."""

    kernels: tuple[Kernel, ...]

    @property
    def microseconds(self) -> float:
        """Time inside kernels."""
        return sum(kernel.per_step * kernel.microseconds for kernel in self.kernels)

    def beside(self, other: "StepTime") -> list[str]:
        """Names of the kernels that this step runs and the other does not, or not as often."""
        mine, theirs = (
            Counter({kernel.name: round(kernel.per_step) for kernel in time.kernels})
            for time in (self, other)
        )
        return sorted((mine - theirs).elements())


def device_times(
    programs: Mapping[str, Program], *, rounds: int, steps: int
) -> dict[str, StepTime]:
    """Time every program, `steps` steps a turn, and give the best of its `rounds` turns."""
    for program in programs.values():
        for _ in range(2):  # compiles, builds plans and fills memory pools
            program.wait(program.step())
    found = -1
    for _ in range(ATTEMPTS):
        turns = split_at_gaps(traced_events(programs, rounds, steps), PAUSE / 2 * 1e9)
        if (found := len(turns)) == rounds * len(programs):
            break
    else:
        raise RuntimeError(
            f"the trace of {rounds * len(programs)} turns has {found} groups of kernels, "
            f"also after {ATTEMPTS} attempts"
        )
    return {
        label: fastest(step_time(turn, steps) for turn in turns[index :: len(programs)])
        for index, label in enumerate(programs)
    }


def fastest(times: Iterable[StepTime]) -> StepTime:
    """Give the least of several times of one program: what disturbs a kernel only slows it."""
    return min(times, key=lambda time: time.microseconds)


def traced_events(programs: Mapping[str, Program], rounds: int, steps: int) -> list[Event]:
    """Let the programs take turns under the profiler, and give what ran on the GPU."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 1
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(rounds):
                for program in programs.values():
                    time.sleep(PAUSE)
                    out = None
                    for _ in range(steps):
                        out = program.step()
                    program.wait(out)
        files = list(Path(folder).rglob("*.xplane.pb"))
        if len(files) != 1:
            raise RuntimeError(f"the profiler wrote {len(files)} traces, expected 1")
        data = jax.profiler.ProfileData.from_file(str(files[0]))  # owns what its planes show
        return gpu_events(data.planes)


def gpu_events(planes: Iterable[Any]) -> list[Event]:
    """Give the events of all streams in the planes of a `jax.profiler.ProfileData`.

    A GPU's plane may also hold lines that are derived from its streams, which would count twice.
    """
    return [
        Event(event.name, event.start_ns, event.duration_ns)
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def split_at_gaps(events: Iterable[Event], gap: float) -> list[list[Event]]:
    """Group events, in order of time, wherever the GPU was idle for `gap` nanoseconds."""
    groups: list[list[Event]] = []
    idle_since = float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        if event.start - idle_since > gap:
            groups.append([])
        groups[-1].append(event)
        idle_since = max(idle_since, event.start + event.duration)
    return groups


def step_time(events: Sequence[Event], steps: int) -> StepTime:
    """Summarise the events of `steps` equal steps; a median shrugs off the odd slow visit."""
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        durations[event.name].append(event.duration)
    return StepTime(
        tuple(
            Kernel(name, len(visits) / steps, statistics.median(visits) / 1e3)
            for name, visits in durations.items()
        )
    )


def kernel_rows(step: StepTime) -> list[tuple[str, float, float]]:
    """Give what is recorded of a step's kernels: name, visits, microseconds of one."""
    return [
        (kernel.name[:120], round(kernel.per_step, 3), round(kernel.microseconds, 3))
        for kernel in step.kernels
    ]
