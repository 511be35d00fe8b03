# SPDX-License-Identifier: Apache-2.0
"""Watching a worker that may hang or crash, and starting it again past what it cannot do.

A worker says in a file what it is about and how long that may take. One that takes longer, or
whose process ends, is started again and told of the fault; there it raises the fault as an
exception where it would have begun the same thing, and goes on.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

START_SECONDS = 120
"""How long a worker may take before it says what it is about."""

POLL_SECONDS = 0.1


class Fault(RuntimeError):
    """What happened when this was tried in an earlier process."""


class Stage(NamedTuple):
    """Something that a worker is about."""

    line: str
    name: str
    limit: float
    since: float

    @property
    def key(self) -> str:
        """What tells it apart."""
        return f"{self.line}: {self.name}"


class Progress:
    """The worker's side."""

    def __init__(self, path: Path, faults: Mapping[str, str]) -> None:
        """Say it in the file at `path`; `faults` are those of earlier processes, by `Stage.key`."""
        self._path, self._faults = path, faults

    @contextmanager
    def stage(self, line: str, name: str, limit: float) -> Iterator[None]:
        """Say what is about to be done, and that it may take `limit` seconds.

        Raises:
            Fault: it went wrong in an earlier process.
        """
        stage = Stage(line, name, limit, time.time())
        if text := self._faults.get(stage.key):
            raise Fault(text)
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps(stage))
        os.replace(new, self._path)
        yield


def supervise(command: Sequence[str], progress: Path, *, seconds: float, **options: Any) -> str:
    """Run a worker until it comes to its end; give what kept it from that, or "".

    Args:
        command: the worker, to which the faults so far are appended as JSON.
        progress: the file that the worker's `Progress` writes.
        seconds: how long all attempts may take together.
        options: more for `subprocess.Popen`.
    """
    faults: dict[str, str] = {}
    deadline = time.time() + seconds
    try:
        while True:
            progress.unlink(missing_ok=True)
            worker = subprocess.Popen([*command, json.dumps(faults)], **options)
            fault = _watch(worker, progress, deadline)
            if not fault or time.time() > deadline:
                return fault
            stage = _read(progress)
            if stage is None or stage.key in faults:  # as it would go on for ever
                return fault
            print(f"  {stage.key}: {fault}; starting again", flush=True)
            faults[stage.key] = fault
    finally:
        progress.unlink(missing_ok=True)


def _watch(worker: subprocess.Popen, progress: Path, deadline: float) -> str:
    """Wait for the worker's end, and bring it about if that takes too long."""
    started = time.time()
    while (status := worker.poll()) is None:
        stage = _read(progress)
        limit, since = (stage.limit, stage.since) if stage else (START_SECONDS, started)
        now = time.time()
        if now > deadline or now > since + limit:
            worker.kill()
            worker.wait()
            return f"took more than {limit:g} s" if now <= deadline else "no time was left"
        time.sleep(POLL_SECONDS)
    return f"its process ended with status {status}" if status else ""


def _read(progress: Path) -> Stage | None:
    return Stage(*json.loads(progress.read_text())) if progress.exists() else None
