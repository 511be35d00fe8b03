# SPDX-License-Identifier: Apache-2.0
"""The depthwise kernels compiled as C++, with a fibre for each thread of a block."""

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthwise_cases import DTYPES
from depthwise_launches import KERNELS, OPERANDS, Configuration, Problem, definitions, launches

HEADER = Path(__file__).parent / "emulator" / "emulate.h"
OPTIONS = (
    "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas",
    "-Wno-unused-function", "-fno-strict-aliasing", "-fsanitize=bounds,shift,alignment",
    "-fsanitize-undefined-trap-on-error",
)  # fmt: skip
MULTIPROCESSORS = 3


class Emulated:
    """One pass of a problem in one configuration."""

    def __init__(
        self,
        compiler: Sequence[str],
        folder: Path,
        problem: Problem,
        op: str,
        configuration: Configuration,
    ) -> None:
        """Compile into a folder."""
        self.problem, self.op = problem, op
        self.launches, self.workspace = launches(problem, op, configuration, MULTIPROCESSORS)
        first = self.launches[0]  # both kernels of a filter gradient are in one file
        library = folder / "kernel.so"
        kernel = f'-DKERNEL="{KERNELS / first.source}"'
        subprocess.run(
            [
                *compiler,
                *OPTIONS,
                kernel,
                *definitions(first.macros),
                *("-x", "c++", HEADER),
                "-o",
                library,
            ],
            check=True,
        )
        self._library = ctypes.CDLL(str(library))

    def __call__(self, a: Any, b: Any, *, defer: bool = False, backwards: bool = False) -> Any:
        """Compute from operands with the dimensions of `Problem.shape`; the result has them too.

        Args:
            a: the first operand.
            b: the second.
            defer: copies to shared memory happen when they are waited for, not at once.
            backwards: the last thread and the last block run first.
        """
        roles = OPERANDS[self.op]
        order = self.problem.order(roles[2])
        dtype = np.dtype(DTYPES[self.problem.dtype])
        operands = [
            _aligned(np.transpose(v, self.problem.order(role)).astype(dtype))
            for v, role in zip((a, b), roles, strict=False)
        ]
        shape = self.problem.shape(roles[2])
        out = _aligned(np.full([shape[axis] for axis in order], np.nan, dtype))
        partial = _aligned(np.full(max(self.workspace, 1), np.nan, np.float32))
        arrays = [(*operands, out)]
        if self.op == "wgrad":
            arrays = [(*operands, partial), (partial, partial, out)]
        for stage, (launch, used) in enumerate(zip(self.launches, arrays, strict=True)):
            self._library.Launch(
                stage, launch.blocks, launch.threads, ctypes.c_int64(launch.shared), defer,
                backwards, *(ctypes.c_void_p(v.ctypes.data) for v in used),
                ctypes.byref(launch.geometry),
            )  # fmt: skip
        return np.transpose(out, np.argsort(order))


def _aligned(array: Any) -> Any:
    """Copy to an address as a GPU's allocations have it."""
    raw = np.empty(array.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
