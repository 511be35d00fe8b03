# SPDX-License-Identifier: Apache-2.0
"""The file of results, written anew after each of them, so that a crash costs none that came."""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Record:
    """The results of one section, in the file that all sections share.

    The file holds {"environment": {...}, "sections": {name: {"figures": {...}, "rows": [...],
    "failures": [...], "seconds": ...}}}; `seconds` is there once a section has come to its end.
    """

    def __init__(self, path: Path, section: str, *, fresh: bool) -> None:
        """Open a section of the file at `path`, which need not exist; if `fresh`, empty it."""
        self._path, self._section = path, section
        self._all = read(path)
        self._start = time.perf_counter()
        if fresh or section not in self._all["sections"]:
            empty = {"figures": {}, "rows": [], "failures": []}
            self._all["sections"][section] = empty
        self._own = self._all["sections"][section]
        self._write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that the section has."""
        return self._own["rows"]

    @property
    def values(self) -> dict[str, Any]:
        """The figures that the section has, by name."""
        return self._own["figures"]

    def environment(self, environment: dict[str, str | None]) -> None:
        """Say on what the figures are measured; all those of another environment are dropped."""

        def lasting(values: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in values.items() if key != "date"}

        if lasting(self._all["environment"]) != lasting(environment):
            self._all["sections"] = {self._section: self._own}
            self._own.update(figures={}, rows=[], failures=[])
        self._all["environment"] = environment
        self._write()

    def figures(self, **figures: Any) -> None:
        """Add named figures."""
        self._own["figures"].update(figures)
        self._write()

    def row(self, **row: Any) -> None:
        """Add a row to the section's table."""
        self._own["rows"].append(row)
        self._write()

    def drop(self, chosen: Callable[[dict[str, Any]], bool]) -> None:
        """Forget some rows, and the failures that are not of an entry whose rows are kept."""
        self._own["rows"] = rows = [row for row in self._own["rows"] if not chosen(row)]
        marks = tuple(row["entry"] + mark for row in rows for mark in (" ", ","))
        self._own["failures"] = [text for text in self._own["failures"] if text.startswith(marks)]
        self._write()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Keep an exception from ending the section: print it, note it and go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failure(f"{what}: {type(error).__name__}: {error}")

    def failure(self, text: str) -> None:
        """Note that something could not be measured."""
        self._own["failures"].append(text[:1000])
        self._write()

    def finish(self) -> None:
        """Note that the section came to its end, and when."""
        self._own["seconds"] = round(time.perf_counter() - self._start, 1)
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(self._path.name + ".new")
        new.write_text(json.dumps(self._all, indent=1) + "\n")
        os.replace(new, self._path)


def read(path: Path) -> dict[str, Any]:
    """Read a file of results; an empty one if there is none."""
    if not path.exists():
        return {"environment": {}, "sections": {}}
    return json.loads(path.read_text())
