# SPDX-License-Identifier: Apache-2.0
"""Figures that are to be reached, and tables in Markdown."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A figure to reach."""

    text: str
    section: str
    limit: float
    unit: str
    value: Callable[[dict[str, Any]], float]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table whose columns are aligned, so that it can be read as it is."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([padded[0], rule, *padded[1:]])


def number(value: float) -> str:
    """Write three digits, or all that are before the point."""
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"
