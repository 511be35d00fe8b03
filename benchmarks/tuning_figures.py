# SPDX-License-Identifier: Apache-2.0
"""Measure what choosing plans costs, how good the choice is, and what plans hold of memory.

    python benchmarks/tuning_figures.py --output reports/tuning.json
    python benchmarks/report.py reports/tuning.json --write docs/tuning.md

Each section runs in a process of its own, and what it has measured is in the file as soon as it is
measured. It needs a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from command import measure, options, run_in_process
from record import Record

TIMEOUTS = {"tuning": 120, "first_call": 330, "lookups": 60, "memory": 240}
"""The sections in the order in which they run, and the seconds that each may take."""

FIRST_CALLS = (
    ("jaxcudnn, nothing stored", "jaxcudnn"),
    ("jaxcudnn, a second process", "jaxcudnn"),
    ("lax, with XLA's autotuning", "lax"),
)
"""The processes whose first training step is timed, and whose convolutions they use."""


def run_section(name: str, args: argparse.Namespace) -> None:
    """Run a section in a process of its own, and note it if that does not end as it should."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "choices")
        run_in_process(__file__, name, args, TIMEOUTS[name], JAXCUDNN_STORE=store)


def work(name: str, args: argparse.Namespace) -> None:
    """Run a section in this process."""
    record = Record(args.output, name, fresh=False)
    if name == "first_call":
        first_calls(record, args)
    else:
        from machines import DryRun, Gpu
        from tuning_sections import QUICK, SECTIONS, Effort

        machine = DryRun() if args.dry_run else Gpu()
        record.environment(machine.environment())
        SECTIONS[name](machine, record, QUICK if args.quick or args.dry_run else Effort())
    record.finish()


def first_calls(record: Record, args: argparse.Namespace) -> None:
    """Time the first training step in one process after another: each is a first."""
    for what, convolutions in FIRST_CALLS:
        command = [sys.executable, __file__, "--first-call", convolutions]
        if args.quick or args.dry_run:
            command.append("--quick")
        with record.attempt(what):
            ran = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
            if ran.returncode:
                raise RuntimeError(ran.stderr[-800:])
            found = json.loads(ran.stdout.splitlines()[-1])
            record.environment(found.pop("environment"))
            record.row(what=what, **found)
            print(f"  {what}: {found}", flush=True)


def first_call(convolutions: str, *, quick: bool) -> None:
    """Time trace, lowering, compilation, tuning and the first run of a step in this process."""
    from machines import DryRun, Gpu
    from resnet import first_step

    machine = DryRun() if os.environ.get("JAX_PLATFORMS") == "cpu" else Gpu()
    found = first_step(convolutions, images=2 if quick else 64, size=32 if quick else 224)
    print(json.dumps({"environment": machine.environment(), **found}))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a report; return 1 if anything could not be measured."""
    description = (__doc__ or "").split("\n")[0]
    parser = options(description, Path("reports/tuning.json"), [*TIMEOUTS])
    parser.add_argument("--first-call", choices=["jaxcudnn", "lax"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.first_call:
        first_call(args.first_call, quick=args.quick)
        return 0
    if args.worker:
        work(args.worker, args)
        return 0
    return measure(args, [*TIMEOUTS], run_section)


if __name__ == "__main__":
    sys.exit(main())
