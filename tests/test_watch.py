# SPDX-License-Identifier: Apache-2.0
"""A worker of the benchmarks that hangs or crashes, and what is made of it."""

import importlib
import sys
import time
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # scripts, which no package holds
watch = importlib.import_module("watch")

WORKER = """
import json, os, sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
from watch import Fault, Progress
progress = Progress(Path({progress!r}), json.loads(sys.argv[1]))
for number in range(3):
    for stage in ("one", "two"):
        try:
            with progress.stage(f"line {{number}}", stage, {limit}):
                {body}
        except Fault as fault:
            print(number, stage, fault, flush=True)
{ending}
"""


def supervised(tmp_path, capfd, body, *, ending="", limit=20.0, seconds=60.0):
    script = WORKER.format(
        folder=str(BENCHMARKS),
        progress=str(tmp_path / "progress"),
        limit=limit,
        body=body,
        ending=ending,
    )
    command = [sys.executable, "-S", "-c", script]
    fault = watch.supervise(command, tmp_path / "progress", seconds=seconds)
    assert list(tmp_path.iterdir()) == []
    lines = capfd.readouterr().out.splitlines()
    return fault, [line for line in lines if not line.startswith(" ")]


def test_a_worker_that_ends_well(tmp_path, capfd):
    assert supervised(tmp_path, capfd, "print(number, stage)") == (
        "",
        [f"{number} {stage}" for number in range(3) for stage in ("one", "two")],
    )


def test_a_worker_that_crashes(tmp_path, capfd):
    body = "os.abort() if (number, stage) == (1, 'two') else None"
    assert supervised(tmp_path, capfd, body) == (
        "", ["1 two its process ended with status -6"]
    )  # fmt: skip


def test_a_worker_that_hangs_twice(tmp_path, capfd):
    body = "time.sleep(60) if (number, stage) in ((0, 'one'), (2, 'one')) else None"
    fault, lines = supervised(tmp_path, capfd, body, limit=0.5)
    assert fault == ""
    assert lines == ["0 one took more than 0.5 s"] * 2 + ["2 one took more than 0.5 s"]


def test_a_worker_that_never_ends_well(tmp_path, capfd):
    fault, lines = supervised(tmp_path, capfd, "pass", ending="raise SystemExit(3)")
    assert fault == "its process ended with status 3"
    assert len(lines) == 1 + 2 + 3 + 4 + 5 + 6  # it is told of one more each time


def test_a_worker_without_time(tmp_path, capfd):
    start = time.monotonic()
    assert supervised(tmp_path, capfd, "time.sleep(60)", seconds=0.5)[0] == "no time was left"
    assert time.monotonic() - start < 30


def test_a_worker_that_never_starts(tmp_path):
    command = [sys.executable, "-S", "-c", "raise SystemExit(2)"]
    fault = watch.supervise(command, tmp_path / "progress", seconds=60)
    assert fault == "its process ended with status 2"
