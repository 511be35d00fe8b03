# SPDX-License-Identifier: Apache-2.0
"""The portable file of choices: lines of JSON, which any version, machine and person can read.

The first line says what the file is and how many choices follow, one a line, so that a file that
was cut short is noticed.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ._choice import Choice

_FORMAT = 1
_LONGEST_LINE = 1 << 20
"""Bytes; a choice has some 600. What has longer lines is another file, of any size."""


def write(path: Path, choices: Sequence[Choice]) -> None:
    """Write choices to a file, which a failure leaves as it was.

    Raises:
        OSError: it cannot be written.
    """
    lines = [{"jaxcudnn_choices": _FORMAT, "entries": len(choices)}, *map(asdict, choices)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path = path.resolve()
    if path.exists() and not path.is_file():  # such as a pipe
        path.write_text(text)
        return
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def read(path: Path) -> list[Choice]:
    """Read what `write` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds anything else.
    """
    with open(path, "rb") as file:
        entries = _read_head(path, file)
        choices = []
        while line := file.readline(_LONGEST_LINE):
            number = len(choices) + 2
            try:
                choices.append(Choice(**_object(line)))
            except (TypeError, ValueError) as error:
                _refuse(path, f"line {number} must be a choice", line, error)
    if len(choices) != entries:
        _refuse(path, f"there must be {entries} choices, as line 1 says", len(choices))
    return choices


def _read_head(path: Path, file: BinaryIO) -> Any:
    line = file.readline(_LONGEST_LINE)
    try:
        head = _object(line)
        version, entries = head["jaxcudnn_choices"], head["entries"]
    except (KeyError, ValueError) as error:
        _refuse(path, "line 1 must say that choices follow", line, error)
    if version != _FORMAT:
        _refuse(path, f"line 1 must say that the format is {_FORMAT}", version)
    return entries


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def _refuse(path: Path, rule: str, got: object, error: Exception | None = None) -> NoReturn:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    why = f" ({error})" if error else ""
    raise ValueError(
        f"jaxcudnn.store.import_: {path}: {rule}, got {shown}{why}; write the file again with "
        f"jaxcudnn.store.export of this version"
    ) from error
