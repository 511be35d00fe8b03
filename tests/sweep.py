# SPDX-License-Identifier: Apache-2.0
"""Every convolution of a small range, in each of the three passes and dtypes."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

import cases
import definition
from calls import integers
from cases import DTYPES, OPERANDS, Case
from definition import Geometry
from reported import SWEEP

BEYOND_WINDOW = {1: (9,), 2: (4, 5), 3: (2, 3, 1)}
"""By how much the sizes exceed what the dilated window spans."""

ROLES = {"x": "lhs", "w": "rhs", "y": "out"}

PREAMBLE = "from calls import integers\nfrom cases import Case\n"


@dataclass(frozen=True)
class Pass:
    """The computation of y, dx or dw of one convolution from integers."""

    case: Case
    role: str
    dtype: str
    precision: str | None
    x64: bool = False

    def __repr__(self) -> str:
        operands = ", ".join(f"integers{self._drawing(role)!r}" for role in OPERANDS[self.role])
        return f"{self.case!r}.cudnn({self.role!r}, precision={self.precision!r})({operands})"

    @property
    def script(self) -> str:
        return f"{PREAMBLE}print({self!r})\n"

    def arrays(self) -> list[np.ndarray]:
        return [integers(*self._drawing(role)) for role in OPERANDS[self.role]]

    def run(self, *arrays: ArrayLike) -> dict[str, jax.Array]:
        return {self.role: self.case.cudnn(self.role, precision=self.precision)(*arrays)}

    def check(self, results: Mapping[str, Any]) -> None:
        computed = results[self.role]
        assert computed.dtype == self.dtype
        np.testing.assert_array_equal(computed, exact(self.case, self.role).astype(computed.dtype))

    def _drawing(self, role: str) -> tuple:
        return ("xwy".index(role), self.case.shape(role), self.dtype)


@lru_cache(maxsize=3)  # the dtypes of one convolution follow one another
def exact(case: Case, role: str) -> np.ndarray:
    arrays = {
        ROLES[name]: integers("xwy".index(name), case.shape(name), "float64")
        for name in OPERANDS[role]
    }
    return definition.compute(ROLES[role], arrays, geometry(case))


def geometry(case: Case) -> Geometry:
    """Give a case in the words of the definition."""
    axes = {ROLES[role]: case.axes(role) for role in ROLES}
    ones = (1,) * len(case.size)
    return Geometry(
        lhs_shape=(case.n, case.c, *case.size),
        rhs_shape=(case.k, case.c // case.groups, *case.window),
        strides=case.strides,
        padding=case.pads,
        lhs_dilation=ones,
        rhs_dilation=case.dilation,
        feature_groups=case.groups,
        batch_groups=1,
        axes=axes,
    )


def convolutions() -> list[Case]:
    """Give all of them, channels last but for each fifth."""
    return [
        convolution(*numbers, last=index % 5 != 4)
        for index, numbers in enumerate(itertools.product(*SWEEP.values()))
    ]


def convolution(
    rank: int, window: int, stride: int, padding: int, dilation: int, groups: int, *, last: bool
) -> Case:
    span = definition.spread(window, dilation)
    return cases.case(
        "sweep",
        tuple(span + more for more in BEYOND_WINDOW[rank]),
        (window,) * rank,
        ((padding, padding),) * rank,
        c=8,
        k=16,
        strides=(stride,) * rank,
        dilation=(dilation,) * rank,
        groups=groups,
        dimension_numbers=(cases.CHANNELS_LAST if last else cases.CHANNELS_FIRST)[rank],
    )


def passes(case: Case, highest: bool) -> list[Pass]:
    return [
        Pass(case, role, dtype, "highest" if highest and dtype == "float32" else None)
        for role in OPERANDS
        for dtype in DTYPES
    ]


PASSES = 9  # of each convolution


def share(index: int, of: int, count: int) -> list[Pass]:
    """Give one process's share of the sweep, or of a part with so many passes."""
    every = convolutions()
    step = max(1, PASSES * len(every) // count)
    mine = list(enumerate(every))[::step][index::of]
    return [one for number, case in mine for one in passes(case, highest=number // 7 % 2 == 1)]
