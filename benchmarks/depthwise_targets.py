# SPDX-License-Identifier: Apache-2.0
"""The depthwise convolutions that are timed, and the configurations that are tried."""

import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from depthwise_launches import Accumulate, Configuration, Correlate, Problem

PROBLEMS = (
    Problem("7x7", 64, 96, (56, 56), (7, 7), padding=((3, 3), (3, 3)), dtype="bfloat16"),
    Problem("31x31", 64, 384, (256, 31), (31, 31), padding=((15, 15),) * 2, dtype="float16"),
    Problem("blur", 100, 1, (530, 1430), (30, 30)),
    Problem("1-D", 16, 512, (1, 16384), (1, 4), padding=((0, 0), (3, 0)), dtype="bfloat16"),
)

channels, columns = partial(Correlate, False), partial(Correlate, True)
summed, summed_columns = partial(Accumulate, False), partial(Accumulate, True)

CONFIGURATIONS: dict[tuple[str, str], list[Configuration]] = {
    # lanes, rows, cols, groups_h, groups_w, chunk, rolling, prefetch, vector, blocks
    ("7x7", "fprop"): [
        channels(16, 4, 7, 1, 8, 7, False, 1, 8, 4),
        channels(16, 4, 7, 2, 8, 7, False, 1, 8, 2),
        channels(16, 4, 7, 2, 4, 7, False, 1, 8, 4),
        channels(16, 4, 7, 1, 8, 7, False, 2, 8, 4),
        channels(16, 7, 7, 1, 8, 7, False, 1, 8, 3),
        channels(16, 7, 7, 2, 4, 7, False, 1, 8, 3),
        channels(16, 5, 7, 2, 8, 7, False, 1, 8, 2),
        channels(16, 4, 7, 2, 8, 7, False, 0, 8, 2),
    ],
    ("31x31", "fprop"): [
        channels(16, 4, 8, 4, 4, 8, True, 1, 8, 2),
        channels(32, 4, 8, 2, 4, 8, True, 1, 8, 2),
        channels(32, 4, 8, 1, 4, 8, True, 1, 8, 4),
        channels(16, 4, 7, 4, 4, 8, True, 1, 8, 2),
        channels(32, 6, 8, 2, 4, 8, True, 1, 8, 1),
        channels(32, 8, 8, 1, 4, 8, True, 1, 8, 2),
        channels(32, 8, 8, 1, 4, 6, True, 1, 8, 2),
        channels(32, 4, 8, 2, 4, 11, True, 1, 8, 1),
    ],
    ("blur", "fprop"): [
        columns(32, 4, 8, 4, 1, 8, True, 1, 1, 4),
        columns(32, 8, 8, 4, 1, 8, True, 1, 1, 4),
        columns(32, 8, 8, 4, 1, 8, False, 1, 1, 4),
        columns(32, 8, 8, 8, 1, 8, False, 1, 1, 2),
        columns(32, 10, 8, 4, 1, 8, False, 1, 1, 4),
        columns(32, 8, 12, 4, 1, 12, False, 1, 1, 3),
        columns(32, 12, 8, 4, 1, 8, False, 1, 1, 3),
        columns(32, 6, 12, 4, 1, 12, False, 2, 1, 3),
    ],
    ("1-D", "fprop"): [
        channels(32, 1, 8, 1, 8, 4, False, 0, 8, 4),
        channels(32, 1, 8, 1, 4, 4, False, 0, 8, 8),
        channels(32, 1, 16, 1, 4, 4, False, 0, 8, 6),
        channels(32, 1, 16, 1, 8, 4, False, 0, 8, 3),
        channels(32, 1, 32, 1, 4, 4, False, 0, 8, 4),
        channels(64, 1, 16, 1, 4, 4, False, 0, 8, 3),
    ],
    # lanes, rows, taps, groups_w, cols, repeats, pad, prefetch, vector, blocks,
    # per_multiprocessor, out_rows
    ("7x7", "wgrad"): [
        summed(16, 7, 7, 8, 7, 1, 0, 1, 8, 3, 3, 14),
        summed(16, 7, 7, 8, 7, 1, 0, 1, 8, 3, 3, 28),
        summed(16, 7, 7, 8, 7, 1, 0, 1, 8, 3, 3, 56),
        summed(16, 4, 7, 8, 7, 1, 0, 1, 8, 2, 2, 28),
        summed(16, 4, 7, 4, 7, 2, 0, 1, 8, 4, 4, 28),
        summed(16, 7, 7, 4, 7, 2, 0, 2, 8, 6, 6, 28),
        summed(48, 7, 7, 4, 7, 2, 0, 1, 8, 2, 2, 28),
        summed(32, 7, 7, 4, 7, 2, 0, 1, 8, 3, 3, 28),
    ],
    ("31x31", "wgrad"): [
        summed(16, 4, 8, 1, 8, 4, 8, 1, 8, 3, 3, 128),
        summed(16, 4, 8, 1, 8, 4, 8, 1, 8, 3, 3, 256),
        summed(16, 8, 8, 1, 8, 4, 8, 1, 8, 3, 3, 256),
        summed(32, 4, 8, 1, 8, 4, 0, 1, 8, 1, 1, 256),
        summed(16, 4, 8, 2, 8, 2, 8, 1, 8, 2, 2, 256),
        summed(32, 8, 8, 1, 8, 4, 0, 1, 8, 1, 1, 256),
    ],
    ("blur", "wgrad"): [
        summed_columns(32, 8, 8, 1, 8, 1, 0, 1, 1, 4, 4, 501),
        summed_columns(32, 8, 8, 2, 8, 1, 0, 1, 1, 2, 2, 501),
        summed_columns(32, 8, 8, 1, 8, 1, 0, 1, 1, 4, 4, 167),
        summed_columns(32, 6, 10, 1, 8, 1, 0, 1, 1, 3, 3, 501),
        summed_columns(32, 10, 10, 1, 8, 1, 0, 1, 1, 4, 4, 501),
        summed_columns(32, 10, 10, 2, 8, 1, 0, 1, 1, 2, 2, 251),
    ],
    ("1-D", "wgrad"): [
        summed(32, 1, 4, 8, 8, 1, 0, 1, 8, 4, 4, 1),
        summed(32, 1, 4, 4, 8, 1, 0, 1, 8, 8, 8, 1),
        summed(32, 1, 4, 4, 8, 2, 0, 1, 8, 8, 8, 1),
        summed(32, 1, 4, 8, 8, 2, 0, 1, 8, 4, 4, 1),
        summed(32, 1, 4, 8, 16, 1, 0, 1, 8, 4, 4, 1),
        summed(64, 1, 4, 4, 8, 2, 0, 1, 8, 4, 4, 1),
    ],
}


def configurations(problem: Problem, op: str) -> list[Configuration]:
    """Give those that are tried for a pass; input gradients try those of the forward pass."""
    return CONFIGURATIONS[problem.name, "wgrad" if op == "wgrad" else "fprop"]
