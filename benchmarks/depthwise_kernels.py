# SPDX-License-Identifier: Apache-2.0
"""Check and time the depthwise kernels of csrc/kernels, which the extension does not use.

    python benchmarks/depthwise_kernels.py --output depthwise.json

It needs an H200 or H100 and NVRTC, and neither JAX on the GPU nor PyTorch. Every configuration is
compared with the definition by `==`, and its time with the floor: the longer of what the GPU takes
to read and write the arrays once, and to multiply and add as often. Compiling takes minutes; with
`--cubins` the results are kept in a folder, and `--compile-only` fills it without a GPU.
"""

import argparse
import ctypes
import hashlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cuda_driver import Driver, compile_source
from depthwise_targets import PROBLEMS, configurations

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from depthwise_cases import DTYPES, Variant, all_cases, defined
from depthwise_launches import KERNELS, OPERANDS, Launch, Problem, definitions, launches

H200 = 132
"""Its multiprocessors; how many there are changes no kernel, only its grid."""
GUARD = 4096
"""Bytes before and behind each result, which have to stay as they were."""


class Cubins:
    """What NVRTC makes of the kernels, in memory and, if there is one, in a folder."""

    def __init__(self, folder: Path | None) -> None:
        """Keep nothing yet."""
        self._folder, self._kept = folder, {}

    def get(self, launch: Launch) -> bytes:
        """Give a kernel's, compiled if need be."""
        source, header = ((KERNELS / name).read_text() for name in (launch.source, "depthwise.cuh"))
        options = ["--gpu-architecture=sm_90", "--std=c++17", "-default-device"]
        options += definitions(launch.macros)
        key = hashlib.sha256("\n".join((source, header, *options)).encode()).hexdigest()[:20]
        path = self._folder / f"{key}.cubin" if self._folder else None
        if key not in self._kept and path and path.exists():
            self._kept[key] = path.read_bytes()
        if key not in self._kept:
            self._kept[key] = compile_source(source, options, {"depthwise.cuh": header})
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._kept[key])
        return self._kept[key]

    def compile(self, variants: Sequence[Variant]) -> None:
        """Compile many, on all cores."""
        firsts = [launches(*variant, H200)[0][0] for variant in variants]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.get, firsts))


class Run:
    """One pass in one configuration, with the memory of its result."""

    def __init__(self, driver: Driver, cubins: Cubins, variant: Variant) -> None:
        """Load the kernels."""
        self._driver = driver
        problem, op, _ = variant
        self.launches, workspace = launches(*variant, driver.multiprocessors)
        self.functions = [driver.function(cubins.get(k), k.name, k.shared) for k in self.launches]
        role = OPERANDS[op][2]
        shape = [problem.shape(role)[axis] for axis in problem.order(role)]
        self._result = np.empty(shape, DTYPES[problem.dtype])
        self._inverse = np.argsort(problem.order(role))
        self._out = driver.allocate(self._result.nbytes + 2 * GUARD)
        self._partial = driver.allocate(4 * max(workspace, 1))

    def __call__(self, a: ctypes.c_uint64, b: ctypes.c_uint64, kernels: int = 2) -> None:
        """Launch, the first so many kernels alone."""
        out = ctypes.c_uint64(self._out.value + GUARD)
        used = [(a, b, out)] if len(self.launches) == 1 else [(a, b, self._partial)]
        used += [(self._partial, out)]
        for k, f, pointers in list(zip(self.launches, self.functions, used, strict=False))[
            :kernels
        ]:
            self._driver.launch(f, k.blocks, k.threads, k.shared, *pointers, k.geometry)

    def result(self) -> Any:
        """Give a copy of the result, with the dimensions of `Problem.shape`.

        Raises:
            RuntimeError: something was written beside it.
        """
        whole = np.empty(self._result.nbytes + 2 * GUARD, np.uint8)
        self._driver.download(self._out, whole)
        if (whole[:GUARD] != 0xFF).any() or (whole[-GUARD:] != 0xFF).any():
            raise RuntimeError("wrote outside of the result")
        found = whole[GUARD:-GUARD].view(self._result.dtype).reshape(self._result.shape)
        return np.transpose(found, self._inverse)

    def free(self) -> None:
        """Free the memory."""
        self._driver.free(self._out, self._partial)


def draw(problem: Problem, op: str) -> list[Any]:
    """Draw operands of small integers, with the dimensions of `Problem.shape`."""
    rng = np.random.default_rng(0)
    return [rng.integers(-2, 3, problem.shape(role), np.int8) for role in OPERANDS[op][:2]]


def upload(driver: Driver, problem: Problem, op: str, operands: Sequence[Any]) -> list[Any]:
    """Copy operands to the GPU, in their order and dtype."""
    return [
        driver.upload(np.transpose(v, problem.order(role)).astype(DTYPES[problem.dtype]))
        for v, role in zip(operands, OPERANDS[op], strict=False)
    ]


def fault(problem: Problem, op: str, operands: Sequence[Any], found: Any) -> str:
    """Compare some channels with the definition, of other passes in the first and last image."""
    some = sorted({0, problem.channels // 3, problem.channels - 1})
    images = range(problem.images) if op == "wgrad" else sorted({0, problem.images - 1})

    def part(array: Any, role: str) -> Any:
        return array[some] if role == "w" else array[np.ix_(images, some)]

    small = replace(problem, images=len(images), channels=len(some))
    a, b = (part(v, role).astype(float) for v, role in zip(operands, OPERANDS[op], strict=False))
    expected = defined(small, op, a, b).astype(DTYPES[problem.dtype])
    wrong = int((part(found, OPERANDS[op][2]) != expected).sum())
    return f"{wrong} of {expected.size} wrong" if wrong else ""


def check(driver: Driver, cubins: Cubins) -> list[str]:
    """Compare small convolutions in every configuration of the tests with the definition."""
    variants, faults = list(all_cases()), []
    cubins.compile(variants)
    for variant in variants:
        problem, op, configuration = variant
        operands = draw(problem, op)
        run, inputs = Run(driver, cubins, variant), upload(driver, problem, op, operands)
        run(*inputs)
        expected = defined(problem, op, *operands).astype(DTYPES[problem.dtype])
        if not np.array_equal(run.result(), expected):
            faults.append(f"{problem.name} {op} {configuration}: wrong")
        run.free()
        driver.free(*inputs)
    print(f"{len(variants)} small convolutions, {len(faults)} wrong", *faults, sep="\n", flush=True)
    return faults


def time_pass(
    driver: Driver, cubins: Cubins, problem: Problem, op: str, rates: tuple[float, float]
) -> list[dict[str, Any]]:
    """Time all configurations of a pass; the first right one checks the others in full."""
    tried = [(problem, op, configuration) for configuration in configurations(problem, op)]
    cubins.compile(tried)
    floor = 1e6 * max(problem.bytes() / rates[0], problem.flops() / rates[1])
    operands, rows, reference = draw(problem, op), [], None
    # Several, lest the second level of cache holds them.
    copies = 3 if problem.bytes() < 3e8 else 1
    inputs = [upload(driver, problem, op, operands) for _ in range(copies)]
    for index, variant in enumerate(tried):
        run = Run(driver, cubins, variant)
        run(*inputs[0])
        found = run.result()
        if reference is None:
            wrong = fault(problem, op, operands, found)
            reference = found if not wrong else None
        else:
            wrong = "" if np.array_equal(found, reference) else "differs from the first"
        (first,) = driver.microseconds([lambda run=run: run(*inputs[0])])
        repeats = int(min(30, max(5, 3e4 / first)))
        us = [
            statistics.median(driver.microseconds([
                lambda i=i, n=kernels, run=run: run(*inputs[i % copies], n)
                for i in range(repeats)
            ]))
            for kernels in (1, 2)
        ]  # fmt: skip
        k = run.launches[0]
        resident = driver.resident(run.functions[0], k.threads, k.shared)
        rows.append(
            {"problem": problem.name, "pass": op, "configuration": str(variant[2])}
            | {"us": us[1], "first_kernel_us": us[0], "floor_us": floor, "fault": wrong}
            | {"resident": resident, "blocks": k.blocks, "threads": k.threads, "shared": k.shared}
        )
        print(
            f"{problem.name:6} {op:5} {index:2} {us[1]:10.1f} us, floor {floor:8.1f} us, "
            f"{floor / us[1]:4.0%}, {resident} blocks of {k.threads} threads {wrong}",
            flush=True,
        )
        run.free()
    driver.free(*(address for pair in inputs for address in pair))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and time; return 1 if there is no GPU, or anything is wrong."""
    parser = argparse.ArgumentParser(description="Check and time the depthwise kernels.")
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--problem", action="append", choices=[p.name for p in PROBLEMS])
    parser.add_argument("--pass", action="append", choices=OPERANDS, dest="ops")
    parser.add_argument("--no-check", action="store_true", help="leave small convolutions out")
    parser.add_argument("--cubins", type=Path, help="a folder that keeps what is compiled")
    parser.add_argument("--compile-only", action="store_true", help="into --cubins; needs no GPU")
    args = parser.parse_args(arguments)
    cubins = Cubins(args.cubins)
    chosen = [
        (problem, op)
        for problem in PROBLEMS
        for op in OPERANDS
        if problem.name in (args.problem or problem.name) and op in (args.ops or op)
    ]
    if args.compile_only:
        cubins.compile([(p, op, c) for p, op in chosen for c in configurations(p, op)])
        cubins.compile([] if args.no_check else list(all_cases()))
        return 0
    try:
        driver = Driver()
    except (OSError, RuntimeError) as error:
        print(f"there is nothing to measure: {error}", file=sys.stderr)
        return 1
    rates = driver.rates()
    print(f"{driver.name}: {rates[0] / 1e12:.2f} TB/s, {rates[1] / 1e12:.1f} TFLOP/s in float32")
    faults = [] if args.no_check else check(driver, cubins)
    figures = {"gpu": driver.name, "rates": rates, "faults": faults, "rows": []}
    for problem, op in chosen:
        figures["rows"] += time_pass(driver, cubins, problem, op, rates)
        if args.output:
            args.output.write_text(json.dumps(figures, indent=1))
    return 1 if faults or any(row["fault"] for row in figures["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
