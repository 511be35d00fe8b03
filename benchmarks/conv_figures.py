# SPDX-License-Identifier: Apache-2.0
"""Measure jaxcudnn on a GPU: against cuDNN's own Python frontend, and against `lax`.

    pip install ".[cuda13]" nvidia-cudnn-frontend==1.28.0
    python benchmarks/conv_figures.py --output reports/benchmarks.json

docs/benchmarks.md says what each section measures. Every section runs in a process of its own, so
that none changes the libraries, the caches or the profiler of another, and what it has measured is
in the file as soon as it is measured. `--dry-run` runs all of it on a CPU, for its own test.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from record import Record, read
from report import render

TIMEOUTS = {"plans": 90, "host": 90, "chain": 120, "layers": 300, "headline": 150}
"""The sections in the order in which they run, and the seconds that each may take."""


def run_section(name: str, args: argparse.Namespace) -> None:
    """Run a section in a process of its own, and note it if that does not end as it should."""
    Record(args.output, name, fresh=True)
    command = [sys.executable, __file__, "--worker", name, "--output", str(args.output)]
    environment = dict(os.environ)
    if args.quick:
        command.append("--quick")
    if args.dry_run:
        command.append("--dry-run")
        environment["JAX_PLATFORMS"] = "cpu"
    try:
        status = subprocess.run(command, env=environment, timeout=TIMEOUTS[name]).returncode
        fault = f"its process ended with status {status}" if status else None
    except subprocess.TimeoutExpired:
        fault = f"its process did not end within {TIMEOUTS[name]} s"
    if fault:
        Record(args.output, name, fresh=False).failure(f"{name}: {fault}")


def work(name: str, args: argparse.Namespace) -> None:
    """Run a section in this process."""
    from machines import DryRun, Gpu  # JAX is for the workers: it would hold the GPU's memory
    from sections import QUICK, SECTIONS, Effort

    record = Record(args.output, name, fresh=False)
    machine = DryRun() if args.dry_run else Gpu()
    record.environment(machine.environment())
    SECTIONS[name](machine, record, QUICK if args.quick else Effort())
    record.finish()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("reports/benchmarks.json"))
    parser.add_argument(
        "--section", action="append", choices=TIMEOUTS, help="only this one; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="few layers and few repetitions")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU; the figures mean nothing")
    parser.add_argument("--worker", choices=TIMEOUTS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def has_gpu() -> bool:
    """Whether JAX can start on a GPU; asked elsewhere, since JAX here would hold its memory."""
    ask = [sys.executable, "-c", "import jax; jax.devices('cuda')"]
    return subprocess.run(ask, capture_output=True, timeout=120).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a report; return 1 if anything could not be measured."""
    args = parse(argv)
    if args.worker:
        work(args.worker, args)
        return 0
    if not args.dry_run and not has_gpu():
        print("JAX finds no GPU here, so there is nothing to measure", file=sys.stderr)
        return 1
    names = [name for name in TIMEOUTS if name in (args.section or TIMEOUTS)]
    for name in names:
        print(f"== {name}", flush=True)
        run_section(name, args)
    results = read(args.output)
    print(render(results))
    return 1 if any(results["sections"][name]["failures"] for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
