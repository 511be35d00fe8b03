# SPDX-License-Identifier: Apache-2.0
"""What the commands that measure have in common: their options, and a process for each section."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from record import Record, read
from report import render


def options(description: str, output: Path, sections: Sequence[str]) -> argparse.ArgumentParser:
    """Give a parser of the options that every command has.

    Args:
        description: what the command does.
        output: the file that it writes unless told otherwise.
        sections: what it can measure, in the order in which it does.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=output)
    parser.add_argument(
        "--section", action="append", choices=sections, help="only this one; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="a few, and few repetitions")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU; the figures mean nothing")
    parser.add_argument("--worker", choices=sections, help=argparse.SUPPRESS)
    return parser


def worker(script: str, name: str, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Give the command line, and the environment, of the process that measures a section."""
    command = [sys.executable, script, "--worker", name, "--output", str(args.output)]
    environment = dict(os.environ)
    if args.quick:
        command.append("--quick")
    if args.dry_run:
        command.append("--dry-run")
        environment["JAX_PLATFORMS"] = "cpu"
    return command, environment


def run_in_process(
    script: str, name: str, args: argparse.Namespace, seconds: float, **changes: str
) -> None:
    """Run a section in a process of its own, and note it if that does not end as it should.

    Args:
        script: the command that is its own worker.
        name: the section's.
        args: the command's.
        seconds: how long it may take.
        **changes: to the environment.
    """
    Record(args.output, name, fresh=True)
    command, environment = worker(script, name, args)
    try:
        status = subprocess.run(command, env=environment | changes, timeout=seconds).returncode
        fault = f"its process ended with status {status}" if status else None
    except subprocess.TimeoutExpired:
        fault = f"its process did not end within {seconds} s"
    if fault:
        Record(args.output, name, fresh=False).failure(f"{name}: {fault}")


def measure(
    args: argparse.Namespace,
    sections: Sequence[str],
    run_section: Callable[[str, argparse.Namespace], None],
    tell: Callable[[dict[str, Any], Sequence[str]], None] | None = None,
) -> int:
    """Measure and tell; return 1 if anything could not be measured, or is wrong.

    Args:
        args: the command's.
        sections: what it measures unless told otherwise.
        run_section: measures one.
        tell: is given all results and the sections that were measured; a report is printed if None.
    """
    if not args.dry_run and not has_gpu():
        print("JAX finds no GPU here, so there is nothing to measure", file=sys.stderr)
        return 1
    names = [name for name in sections if name in (args.section or sections)]
    for name in names:
        print(f"== {name}", flush=True)
        run_section(name, args)
    results = read(args.output)
    if tell:
        tell(results["sections"], names)
    else:
        print(render(results))
    return 1 if any(results["sections"][name]["failures"] for name in names) else 0


def tell_failures(sections: dict[str, Any], names: Sequence[str]) -> None:
    """Say what could not be measured."""
    for text in (text for name in names for text in sections[name]["failures"]):
        print(f"not measured: {text}", file=sys.stderr)


def has_gpu() -> bool:
    """Whether JAX can start on a GPU; asked elsewhere, since JAX here would hold its memory."""
    ask = [sys.executable, "-c", "import jax; jax.devices('cuda')"]
    return subprocess.run(ask, capture_output=True, timeout=120).returncode == 0
