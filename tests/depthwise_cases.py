# SPDX-License-Identifier: Apache-2.0
"""Small depthwise convolutions with configurations of the kernels, and the definition in NumPy."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from depthwise_launches import Accumulate, Configuration, Correlate, Problem, axes

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SAME = ((1, 1), (1, 1))

CHANNELS = (
    Problem("plain", 2, 16, (7, 9), (3, 3), padding=SAME, dtype="bfloat16"),
    Problem("odd channels", 2, 7, (8, 11), (3, 3), padding=((0, 2), (1, 0)), dtype="float16"),
    Problem("even window", 1, 12, (9, 10), (4, 2), padding=((2, 1), (0, 1)), flip=True),
    Problem(
        "stride", 2, 24, (11, 13), (3, 5), (2, 2), padding=((1, 1), (2, 2)), dtype="bfloat16"
    ),
    Problem("stride, no padding", 1, 6, (12, 9), (2, 3), (3, 2), dtype="float16"),
    Problem("window under stride", 1, 8, (11, 10), (1, 2), (3, 3), padding=((1, 0), (0, 2))),
    Problem(
        "dilation", 2, 10, (13, 12), (3, 3), (1, 1), (2, 3), ((2, 2), (3, 1)), dtype="float16"
    ),
    Problem(
        "stride and dilation", 2, 8, (14, 17), (3, 4), (2, 2), (3, 2), ((3, 2), (1, 4)), True,
        "bfloat16",
    ),
    Problem(
        "stride 4, dilation 6", 1, 8, (23, 30), (3, 3), (4, 6), (6, 4), ((6, 6), (4, 4))
    ),
    Problem("large window", 1, 8, (9, 10), (11, 13), padding=((5, 5), (6, 6)), dtype="float16"),
    Problem("large padding", 1, 8, (3, 2), (5, 7), padding=((6, 4), (9, 5)), dtype="bfloat16"),
    Problem("line", 2, 32, (1, 37), (1, 4), padding=((0, 0), (3, 0)), dtype="bfloat16"),
    Problem("HWIO", 2, 8, (7, 9), (3, 3), padding=SAME, hwio=True),
)  # fmt: skip
"""Threads of a warp compute neighbouring channels."""

COLUMNS = (
    Problem("one channel", 2, 1, (9, 50), (4, 6), padding=((2, 1), (3, 2))),
    Problem(
        "channels first", 2, 3, (7, 41), (3, 3), padding=SAME, dtype="float16", channels_first=True
    ),
    Problem(
        "few channels", 2, 3, (7, 41), (5, 5), (2, 2), padding=((2, 2), (2, 2)), dtype="bfloat16"
    ),
    Problem(
        "column dilation", 1, 2, (12, 45), (3, 4), (2, 3), (3, 2), ((3, 2), (1, 4)), True
    ),
    Problem("column window", 1, 1, (12, 30), (9, 13), padding=((4, 4), (6, 6)), dtype="float16"),
)  # fmt: skip
"""Threads of a warp compute neighbouring columns."""

Variant = tuple[Problem, str, Configuration]


def variants(problem: Problem, op: str) -> list[Variant]:
    """Give the configurations in which a pass is tried."""
    if op == "wgrad":
        return [(problem, op, c) for c in _accumulate(problem)]
    return [(problem, op, c) for c in _correlate(problem, op)]


def cases() -> Iterator[Variant]:
    """Give every problem and pass in one configuration, which takes its turn among all."""
    for i, problem in enumerate((*CHANNELS, *COLUMNS)):
        for j, op in enumerate(("fprop", "dgrad", "wgrad")):
            offered = variants(problem, op)
            yield offered[(i + j) % len(offered)]


def all_cases() -> Iterator[Variant]:
    """Give every problem and pass in every configuration."""
    for problem in (*CHANNELS, *COLUMNS):
        for op in ("fprop", "dgrad", "wgrad"):
            yield from variants(problem, op)


def _correlate(problem: Problem, op: str) -> list[Correlate]:
    if problem in COLUMNS:
        stride = axes(problem, op)[1].stride
        return [
            Correlate(True, 4, 2, 4, 2, 2, 4 * stride, False, 1, 1),
            Correlate(True, 4, 2, 8, 3, 1, 8 * stride, True, 2, 1),
            Correlate(True, 4, 2, 4, 2, 2, 8 * stride, False, 0, 1),
        ]
    vector = problem.largest_vector()
    few = min(vector, 8 // np.dtype(DTYPES[problem.dtype]).itemsize) // 2 or 1
    return [
        Correlate(False, 4, 2, 3, 2, 2, 3, False, 1, vector),
        Correlate(False, 8, 3, 5, 1, 3, 4, True, 2, few),
        Correlate(False, 4, 1, 3, 3, 2, 2, False, 0, vector),
    ]


def _accumulate(problem: Problem) -> list[Accumulate]:
    rows, taps = problem.window
    if problem in COLUMNS:
        return [
            Accumulate(True, 4, 2, 3, 1, 4, 1, 0, 1, 1, out_rows=5),
            Accumulate(True, 4, rows, 4, 2, 3, 2, 0, 2, 1, out_rows=5),
        ]
    vector = problem.largest_vector()
    return [
        Accumulate(False, 4, 2, 3, 2, 3, 1, 0, 1, vector, out_rows=5),
        Accumulate(False, 8, rows, taps, 1, 3, 3, 0, 2, vector, out_rows=100),
        Accumulate(False, 4, 1, 2, 3, 2, 1, 8, 1, vector, out_rows=3),
    ]


def defined(problem: Problem, op: str, a: Any, b: Any) -> Any:
    """Give the result by the definition, in float64; padding adds nothing, whatever meets it.

    Args:
        problem: the forward convolution.
        op: the pass.
        a: its first operand, with the dimensions of `Problem.shape`.
        b: its second.
    """
    shape = {"fprop": problem.shape("y"), "dgrad": problem.shape("x"), "wgrad": problem.shape("w")}
    result = np.zeros(shape[op])
    every = (range(problem.images), range(problem.channels))
    for row in range(problem.window[0]):
        out_h, in_h = _meeting(problem, row, 0)
        for col in range(problem.window[1]):
            out_w, in_w = _meeting(problem, col, 1)
            outs, ins = np.ix_(*every, out_h, out_w), np.ix_(*every, in_h, in_w)
            tap = (row, col)
            if problem.flip:
                tap = (problem.window[0] - 1 - row, problem.window[1] - 1 - col)
            if op == "wgrad":
                result[:, *tap] += (a[ins] * b[outs]).sum((0, 2, 3))
                continue
            to, of = (outs, ins) if op == "fprop" else (ins, outs)
            result[to] += a[of] * b[:, *tap][None, :, None, None]
    return result


def _meeting(problem: Problem, tap: int, axis: int) -> tuple[Any, Any]:
    out = np.arange(problem.out[axis])
    at = out * problem.stride[axis] + tap * problem.dilation[axis] - problem.padding[axis][0]
    inside = (at >= 0) & (at < problem.size[axis])
    return out[inside], at[inside]
