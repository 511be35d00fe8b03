# SPDX-License-Identifier: Apache-2.0
"""Figures and tables of what `tuning_figures.py` measures."""

from collections.abc import Callable
from typing import Any

from tables import Figure, number, table


def seconds(section: dict[str, Any], what: str) -> float:
    """Give the duration of a first call."""
    return next(row["seconds"] for row in section["rows"] if row["what"].startswith(what))


FIGURES = (
    Figure(
        "Measuring the plans of a new convolution, median",
        "tuning",
        150,
        "ms",
        lambda section: section["figures"]["median_ms"],
    ),
    Figure(
        "The plan chosen within the budget over the fastest of all, bfloat16: the largest ratio",
        "tuning",
        1.02,
        "",
        lambda section: section["figures"]["worst_ratio"]["bfloat16"],
    ),
    Figure(
        "The same, float32",
        "tuning",
        1.02,
        "",
        lambda section: section["figures"]["worst_ratio"]["float32"],
    ),
    Figure(
        "First call of a ResNet-50 training step over `lax`'s",
        "first_call",
        1,
        "",
        lambda section: seconds(section, "jaxcudnn, n") / seconds(section, "lax"),
    ),
    Figure(
        "The same in a second process",
        "first_call",
        0.5,
        "",
        lambda section: seconds(section, "jaxcudnn, a") / seconds(section, "lax"),
    ),
    Figure(
        "Cached plan look-up in Initialize, median",
        "lookups",
        2,
        "us",
        lambda section: section["figures"]["median_ns"] / 1e3,
    ),
)


def tuning_part(section: dict[str, Any]) -> str:
    """Tell what measuring cost and found, a row of the table for each pass."""
    figures = section["figures"]
    text = (
        f"Plans measured within the budget of {number(figures['budget_ms'])} ms, which took "
        f"{number(figures['most_ms'])} ms at most, and exhaustively. Microseconds on the "
        "device, and the ratio to the fastest of all plans."
    )
    head = ("convolution", "pass", "dtype", "plan", "tried", "ms", "us", "ratio", "exhaustive ms")
    rows = [
        (
            row["layer"],
            row["op"],
            row["dtype"],
            row["plan"].split("_")[0],
            str(row["tried"]),
            number(row["ms"]),
            f"{row['us']:.1f}",
            f"{row['ratio']:.3f}",
            number(row["exhaustive_ms"]),
        )
        for row in section["rows"]
    ]
    return f"{text}\n\n{table(head, rows)}"


def first_call_part(section: dict[str, Any]) -> str:
    """Tell how long first calls took."""
    text = (
        "First call of a jitted training step of ResNet-50 (64x224x224x3, bfloat16, 158 "
        "convolutions): trace, lowering, compilation, tuning and the first run."
    )
    rows = [
        (row["what"], number(row["seconds"]), number(row["next_ms"])) for row in section["rows"]
    ]
    return f"{text}\n\n{table(('process', 'first call, s', 'later steps, ms'), rows)}"


def lookups_part(section: dict[str, Any]) -> str:
    """Tell how long a known plan takes to find."""
    figures = section["figures"]
    return (
        f"Initialize, in {figures['programs']} new programs whose plan the process knew: median "
        f"{number(figures['first_ns'] / 1e3)} us in their first run, with everything out of the "
        f"processor's caches after a compilation, and {number(figures['median_ns'] / 1e3)} us in "
        "later ones."
    )


def memory_part(section: dict[str, Any]) -> str:
    """Tell what plans hold of the host's memory."""
    figures = section["figures"]
    first, second = figures["executions_kib"]
    return (
        f"Host memory: {figures['shapes']} shapes planned in one process, of which the cache keeps "
        f"{figures['kept']} plans, grew it by {number(figures['shapes_mib'])} MiB (to "
        f"{number(figures['peak_mib'])} MiB at its peak). After {figures['executions']} runs of "
        f"one program, as many again grew it by {number(first)} KiB, and as many again by "
        f"{number(second)} KiB."
    )


PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tuning": tuning_part,
    "first_call": first_call_part,
    "lookups": lookups_part,
    "memory": memory_part,
}
