# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with the environment's variables, the options and the store."""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ._doctor_finding import Fault, Finding
from ._options import Options, xla_is_deterministic

_PREFIX = "JAXCUDNN_"
_OPTIONS = {each.name: f"{_PREFIX}{each.name.upper()}" for each in fields(Options)}
_STORE = f"{_PREFIX}STORE"

_OF_TESTS = tuple(
    f"{_PREFIX}{name}"
    for name in (
        "EXAMPLES", "FULL_MATRIX", "FUZZ", "MATRIX_OF", "REQUIRE_GPU", "SPACE", "WORKERS",
    )
)  # fmt: skip

# Others' variables and flags that bear on where a convolution runs, and by which plan.
_OTHERS = (
    "CUDA_VISIBLE_DEVICES", "CUDNN_LIB_CONFIG", "JAX_PLATFORMS", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
_XLA_FLAGS = re.compile(
    r"--xla_gpu_(deterministic_ops|exclude_nondeterministic_ops|enable_command_buffer|graph_)"
)


def check_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Report the environment's variables that matter, and names that nobody reads."""
    known = [*_OPTIONS.values(), _STORE, *_OF_TESTS]
    findings = []
    for name, value in sorted(environ.items()):
        if name.startswith(_PREFIX) and name not in known:
            rests = [each.removeprefix(_PREFIX) for each in known]
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), rests, n=1)
            remedy = (
                f"write {_PREFIX}{near[0]}" if near else f"unset it; there are {', '.join(known)}"
            )
            fault = Fault("jaxcudnn reads no variable of this name", remedy)
            findings.append(Finding(name, value, (fault,)))
        elif name in (*_OF_TESTS, *_OTHERS):
            findings.append(Finding(name, value))
    flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if _XLA_FLAGS.match(flag)]
    if flags:
        findings.append(Finding("XLA_FLAGS", " ".join(flags)))
    return findings


def check_options(current: Callable[[], Options], environ: Mapping[str, str]) -> list[Finding]:
    """Report the options in force, and which variable each comes from.

    Args:
      current: gives them, or raises TypeError or ValueError if a variable cannot be read.
      environ: the variables.
    """
    try:
        options = current()
    except (TypeError, ValueError) as error:
        text = str(error).removeprefix("jaxcudnn: ")
        given = ", ".join(f"{v}={environ[v]}" for v in _OPTIONS.values() if environ.get(v))
        return [Finding("option", given, (Fault(text, "correct the variable, or unset it"),))]
    findings = []
    for name, variable in _OPTIONS.items():
        source = f"by {variable}" if environ.get(variable) else "the default"
        if name == "deterministic" and xla_is_deterministic():
            source += ", but XLA_FLAGS turns it on"
        findings.append(Finding("option", f"{name} = {getattr(options, name)!r}, {source}"))
    return findings


def check_store(path: Callable[[], Path | None], info: Callable[[], Any]) -> Finding:
    """Report the store of measured choices.

    Args:
      path: gives its file, or None if it is off.
      info: gives its `entries` and `bytes`, or raises OSError.
    """
    file = path()
    if file is None:
        return Finding("store", f"off, by {_STORE}")
    remedy = f"set {_STORE} to a file that can be read and written, or to 'off'"
    try:
        found = info()
    except OSError as error:
        return Finding("store", str(file), (Fault(str(error), remedy),))
    text = f"{file}, {found.entries} choices in {found.bytes} bytes"
    place = next(each for each in (file, *file.parents) if each.exists())
    if os.access(place, os.W_OK):
        return Finding("store", text)
    fault = Fault(f"{place} cannot be written, so that every process measures anew", remedy)
    return Finding("store", text, (fault,))
