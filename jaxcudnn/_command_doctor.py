# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxcudnn doctor`: what is installed, what is wrong with it, and what to do."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from . import _doctor
from ._doctor_finding import Finding


def add(subparsers: Any) -> None:
    """Add the command to the command line."""
    text = "say what is installed and loaded, what is wrong with it, and what to do"
    parser = subparsers.add_parser("doctor", help=text, description=f"S{text[1:]}.")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is found, then each fault with its remedy; the status is 1 if there is any."""
    del arguments
    # JAX would take most of the GPU's memory, where other programs may be running.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    findings = _doctor.examine()
    print(report(findings))
    return int(any(finding.faults for finding in findings))


def report(findings: Sequence[Finding]) -> str:
    """Give aligned lines of what was found, then the faults, those with one remedy together."""
    width = 1 + max(len(finding.what) for finding in findings)
    lines = [f"{finding.what + ':':{width}} {finding.found}" for finding in findings]
    texts: dict[str, list[str]] = {}
    for finding in findings:
        for fault in finding.faults:
            texts.setdefault(fault.remedy, []).append(f"FAULT   {finding.what}: {fault.text}")
    for remedy, with_remedy in texts.items():
        lines += ["", *with_remedy, f"REMEDY  {remedy}"]
    return "\n".join(lines if texts else [*lines, "", "No fault was found."])
