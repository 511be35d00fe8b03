# SPDX-License-Identifier: Apache-2.0
"""Times of steps: what a GPU's visits add up to, whichever profiler saw them, and the wall clock.

This module imports neither JAX nor PyTorch.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One visit of the GPU's: a kernel, a memset or a copy. Times in nanoseconds."""

    name: str
    start: float
    duration: float


def busy_microseconds(events: Iterable[Event]) -> float:
    """Give the time in which the GPU does anything: what overlaps counts once."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        end = event.start + event.duration
        total += max(0.0, end - max(until, event.start))
        until = max(until, end)
    return total / 1e3


def largest(events: Iterable[Event], steps: int, count: int) -> list[tuple[str, float, float]]:
    """Give the names that take the most time: with their visits, and microseconds, in a step."""
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        durations[event.name].append(event.duration)
    rows = [
        (name[:120], round(len(visits) / steps, 3), round(sum(visits) / steps / 1e3, 2))
        for name, visits in durations.items()
    ]
    return sorted(rows, key=lambda row: -row[2])[:count]


def step_figures(turns: Sequence[Sequence[Event]], steps: int) -> dict[str, Any]:
    """Summarise turns of so many equal steps, of which the fastest counts.

    Returns:
        "device_ms", the time in which the GPU does anything in a step, and "kernels", the names
        that take the most of it.
    """
    best = min(turns, key=busy_microseconds)
    return {"device_ms": busy_microseconds(best) / steps / 1e3, "kernels": largest(best, steps, 40)}


def wall_ms(step: Callable[[], Any], wait: Callable[[Any], object], steps: int) -> float:
    """Give the milliseconds of a step, where steps are waited for once, after the last."""
    start, out = time.perf_counter(), None
    for _ in range(steps):
        out = step()
    wait(out)
    return (time.perf_counter() - start) / steps * 1e3
