# SPDX-License-Identifier: Apache-2.0
"""Runs thousands of small computations, in few compilations and in several processes.

A computation prints as a script that repeats it. `run` starts processes, each of which is this
file: it draws its share, computes it in batches, and writes down what it is about to do and what it
has done, so that a process that dies or hangs has said in which batch.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxcudnn import _load
from processes import PACKAGE

# Computations are run once, so what takes longer to compile than it saves is left out.
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_backend_optimization_level": 0},
    "gpu": {"xla_gpu_autotune_level": 0},
}
PATH = os.pathsep.join([str(PACKAGE), str(Path(__file__).parent)])
ENVIRONMENT = {
    "PYTHONPATH": PATH,
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # of XLA's own kernels, which takes long
}
LOG, BATCH, REPORT = "log", "batch.py", "report.json"
GRACE = 60  # seconds for a process to start, and to end after its time
SHOWN = 5  # failures of each process; the others are counted


class Computation(Protocol):
    """What is run: its arrays, its results, and whether they are right."""

    @property
    def x64(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def script(self) -> str: ...
    def arrays(self) -> Sequence[np.ndarray]: ...
    def run(self, *arrays: Any) -> Mapping[str, jax.Array]: ...
    def check(self, results: Mapping[str, Any]) -> None: ...


class Outcome(NamedTuple):
    computation: Computation
    error: Exception | None
    lax: int
    """Convolutions of `lax` in the lowered computation."""
    cudnn: int
    """Custom calls of ours in it."""


@dataclass
class Report:
    run: int = 0
    by_lax: Counter[str] = field(default_factory=Counter)
    """How many computations, by dtype, had a convolution of `lax` in them."""
    by_lax_too: list[str] = field(default_factory=list)
    """Scripts of the first few of those."""
    custom_calls: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    """How many failed, by dtype."""
    failures: list[str] = field(default_factory=list)
    """Errors and scripts, of the first few."""

    @classmethod
    def read(cls, text: str) -> "Report":
        report = cls(**json.loads(text))
        report.by_lax, report.wrong = Counter(report.by_lax), Counter(report.wrong)
        return report

    @property
    def text(self) -> str:
        return json.dumps(vars(self))

    def add(self, outcome: Outcome) -> None:
        dtype = outcome.computation.dtype
        self.run += 1
        self.custom_calls += outcome.cudnn
        if outcome.lax:
            self.by_lax[dtype] += 1
            self.by_lax_too += [outcome.computation.script][: SHOWN - len(self.by_lax_too)]
        if outcome.error is not None:
            self.wrong[dtype] += 1
            if len(self.failures) < SHOWN:
                self.failures.append(describe(outcome.computation, outcome.error))

    def merge(self, other: "Report") -> None:
        self.run += other.run
        self.by_lax += other.by_lax
        self.by_lax_too += other.by_lax_too
        self.custom_calls += other.custom_calls
        self.wrong += other.wrong
        self.failures += other.failures

    def __str__(self) -> str:
        def counts(counter: Counter[str]) -> str:
            parts = (f"{name} {number}" for name, number in sorted(counter.items()))
            return f"{counter.total()}" + (f" ({', '.join(parts)})" if counter else "")

        return (
            f"{self.run} run, {counts(self.wrong)} wrong, {self.custom_calls} custom calls, "
            f"{counts(self.by_lax)} with a convolution of lax"
        )


def describe(computation: Computation, error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:2000]}\n{computation.script}"


def in_batches(computations: Iterable[Computation], size: int) -> Iterator[list[Computation]]:
    """Give them in lists that share a compilation, and so the setting for 64 bits."""
    waiting: dict[bool, list[Computation]] = {False: [], True: []}
    for computation in computations:
        batch = waiting[computation.x64]
        batch.append(computation)
        if len(batch) == size:
            yield batch
            waiting[computation.x64] = []
    yield from filter(None, waiting.values())


def run_batch(batch: Sequence[Computation], platform: str) -> Iterator[Outcome]:
    """Compute a batch in one compilation, or one by one if that raises."""
    try:
        results, text = compute(batch, OPTIONS[platform])
    except Exception as error:
        if len(batch) > 1:
            for computation in batch:
                yield from run_batch([computation], platform)
        else:
            yield Outcome(batch[0], error, 0, 0)
        return
    convolutions = count_convolutions(text)
    for index, (computation, result) in enumerate(zip(batch, results, strict=True)):
        try:
            computation.check(result)
            error = None
        except AssertionError as wrong:
            error = wrong
        yield Outcome(computation, error, *convolutions[name(index)])


def compute(
    batch: Sequence[Computation], options: dict[str, Any]
) -> tuple[list[Mapping[str, np.ndarray]], str]:
    """Give the results, and the module that was compiled."""
    functions = [with_name(computation, index) for index, computation in enumerate(batch)]

    def everything(operands):
        return [jax.jit(f)(*one) for f, one in zip(functions, operands, strict=True)]

    with jax.enable_x64(batch[0].x64):
        operands = [computation.arrays() for computation in batch]
        lowered = jax.jit(everything).lower(operands)
        results = lowered.compile(compiler_options=options)(operands)
        return jax.tree.map(np.asarray, results), lowered.as_text()


def with_name(computation: Computation, index: int):
    """Give a function that keeps its name in the lowered module when it is jitted."""

    def function(*arrays):
        return computation.run(*arrays)

    function.__name__ = name(index)
    return function


def name(index: int) -> str:
    return f"computation_{index}"


def count_convolutions(text: str) -> dict[str, tuple[int, int]]:
    """Count `lax`'s convolutions and our custom calls in each function of a lowered module."""
    parts = re.split(r"^ *func\.func ", text, flags=re.MULTILINE)[1:]
    bodies = {re.findall(r"@(\w+)", part)[0]: part for part in parts}

    def count(name: str) -> tuple[int, int]:
        body = bodies[name]
        found = [(body.count("stablehlo.convolution"), body.count(f"@{_load.TARGET}("))]
        found += map(count, re.findall(r"\bcall @(\w+)\(", body))
        return sum(lax for lax, _ in found), sum(cudnn for _, cudnn in found)

    return {name: count(name) for name in bodies}


def run(
    source: str, *, count: int, workers: int, size: int, seconds: float, **environment: str
) -> Report:
    """Compute what a source draws, in so many processes, each of which stops after its time.

    The source, MODULE:FUNCTION, is told the number of the process, how many there are and the count
    of all computations, and gives those of the process.
    """
    given = {"source": source, "count": count, "of": workers, "size": size, "seconds": seconds}
    deadline = time.monotonic() + seconds + GRACE
    total = Report()
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent, str(index)) for index in range(workers)]
        processes = [start(folder, given, environment) for folder in folders]
        try:
            for folder, process in zip(folders, processes, strict=True):
                total.merge(collect(folder, process, deadline))
        finally:
            for process in processes:
                process.kill()
    return total


def start(
    folder: Path, given: Mapping[str, Any], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    arguments = [f"--{name}={value}" for name, value in given.items()]
    with open(folder / LOG, "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", __file__, str(folder), *arguments],
            env={**os.environ, **ENVIRONMENT, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def collect(folder: Path, process: subprocess.Popen[bytes], deadline: float) -> Report:
    """Wait for a process and read its report; its end is a failure unless it ended well."""
    try:
        status = process.wait(max(0, deadline - time.monotonic()))
        ended = f"ended with status {status}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        status, ended = None, "had not ended long after its time"
    report = Report()
    if (folder / REPORT).exists():
        report = Report.read((folder / REPORT).read_text())
    if status != 0:
        log = (folder / LOG).read_text(errors="replace")[-2000:]
        batch = (folder / BATCH).read_text() if (folder / BATCH).exists() else "nothing yet\n"
        report.wrong["process"] += 1
        report.failures.append(f"process {folder.name} {ended}, computing\n{batch}{log}")
    return report


def work(folder: Path, source: str, count: int, of: int, size: int, seconds: float) -> None:
    """Do one process's share."""
    end = time.monotonic() + seconds
    module, function = source.split(":")
    draw = getattr(importlib.import_module(module), function)
    report, platform = Report(), jax.default_backend()
    for batch in in_batches(draw(int(folder.name), of, count), size):
        if time.monotonic() > end:
            break
        (folder / BATCH).write_text("".join(computation.script for computation in batch))
        for outcome in run_batch(batch, platform):
            report.add(outcome)
        (folder / REPORT).write_text(report.text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source")
    for name in ("count", "of", "size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seconds", type=float)
    work(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
