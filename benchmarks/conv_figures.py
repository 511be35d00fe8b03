# SPDX-License-Identifier: Apache-2.0
"""Measure jaxcudnn on a GPU: against cuDNN's own Python frontend, and against `lax`.

    pip install ".[cuda13]" nvidia-cudnn-frontend==1.28.0
    python benchmarks/conv_figures.py --output reports/benchmarks.json

docs/benchmarks.md says what each section measures. Every section runs in a process of its own, so
that none changes the libraries, the caches or the profiler of another, and what it has measured is
in the file as soon as it is measured. `--dry-run` runs all of it on a CPU, for its own test.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from command import measure, options, run_in_process
from record import Record

TIMEOUTS = {"plans": 90, "host": 90, "chain": 120, "layers": 300, "headline": 150, "fused": 240}
"""The sections in the order in which they run, and the seconds that each may take."""


def run_section(name: str, args: argparse.Namespace) -> None:
    """Run a section in a process of its own."""
    run_in_process(__file__, name, args, TIMEOUTS[name])


def work(name: str, args: argparse.Namespace) -> None:
    """Run a section in this process."""
    from effort import QUICK, Effort
    from machines import DryRun, Gpu  # JAX is for the workers: it would hold the GPU's memory
    from sections import SECTIONS

    record = Record(args.output, name, fresh=False)
    machine = DryRun() if args.dry_run else Gpu()
    record.environment(machine.environment())
    SECTIONS[name](machine, record, QUICK if args.quick else Effort())
    record.finish()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a report; return 1 if anything could not be measured."""
    description = (__doc__ or "").split("\n")[0]
    args = options(description, Path("reports/benchmarks.json"), [*TIMEOUTS]).parse_args(argv)
    if args.worker:
        work(args.worker, args)
        return 0
    return measure(args, [*TIMEOUTS], run_section)


if __name__ == "__main__":
    sys.exit(main())
