# SPDX-License-Identifier: Apache-2.0
"""Measure the reported problems of tests/data on a GPU, and transposed convolutions.

    pip install ".[cuda13]" pytest
    python benchmarks/reported_figures.py --output reports/reported.json

docs/reported.md says what is measured. Each section runs in a process of its own, which is started
again where a convolution hangs or crashes it, and what has been measured is in the file as soon as
it is. PyTorch is measured too if it is installed. `--dry-run` runs all of it on a CPU, at reduced
sizes, for its own test.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from command import measure, options, worker
from record import Record
from watch import Progress, supervise

TIMEOUTS = {"reported": 540, "transposed": 300}
"""The sections, and the seconds that each may take in all."""

QUICK_ENTRIES = ("jax#17464", "jax#30469", "pytorch#107514", "pytorch#19599")
QUICK_LAYERS = 2


def run_section(name: str, args: argparse.Namespace) -> None:
    """Run a section in processes of its own, and note what kept it from its end."""
    # PyTorch is measured once for all transposed ones, so that those are measured together too.
    keeps = name == "reported" and (args.resume or args.entry)
    kept = Record(args.output, name, fresh=not keeps)
    if keeps:
        kept.drop(lambda row: not args.resume and is_chosen(row["entry"], args, ()))
    progress = args.output.with_suffix(".progress")
    command, environment = worker(__file__, name, args)
    for entry in args.entry or ():
        command += ["--entry", entry]
    command += ["--progress", str(progress), "--faults"]
    fault = supervise(command, progress, seconds=TIMEOUTS[name], env=environment)
    if fault:
        Record(args.output, name, fresh=False).failure(f"{name}: {fault}")


def work(name: str, args: argparse.Namespace) -> None:
    """Run a section in this process, past the lines that an earlier one has recorded."""
    from machines import DryRun, Gpu  # JAX is for the workers: it would hold the GPU's memory

    record = Record(args.output, name, fresh=False)
    progress = Progress(args.progress, json.loads(args.faults))
    machine = DryRun() if args.dry_run else Gpu()
    record.environment(machine.environment())
    {"reported": reported, "transposed": transposed}[name](machine, record, progress, args)
    record.finish()


def reported(machine, record: Record, progress: Progress, args: argparse.Namespace) -> None:
    """Measure every entry against `lax`."""
    from entries import QUICK, Effort, Measurement, record_rows

    from reported import load

    done = {row["entry"] for row in record.rows}
    for entry in load():
        if entry.name in done or not is_chosen(entry.name, args, QUICK_ENTRIES):
            continue
        effort = QUICK if args.quick else Effort()
        measurement = Measurement(machine, progress, entry.name, machine.scaled(entry), effort)
        measurement.run()
        record_rows(record, measurement)
    order = [entry.name for entry in load()]
    record.rows.sort(key=lambda row: order.index(row["entry"]))


def transposed(machine, record: Record, progress: Progress, args: argparse.Namespace) -> None:
    """Measure transposed convolutions against PyTorch, and in bfloat16 against `lax`."""
    from entries import QUICK, Effort, Measurement, record_rows
    from transposed import DTYPES, LAYERS, TORCH_SECONDS, line_name, torch_layer, torch_times
    from transposed import transposed as transpose

    few = [line_name(conv, dtype) for conv in LAYERS[:QUICK_LAYERS] for dtype in DTYPES]
    lines = [
        (conv, dtype)
        for dtype in DTYPES
        for conv in LAYERS
        if is_chosen(line_name(conv, dtype), args, few)
    ]
    if "torch" not in record.values:
        peer = {"version": None, "us": {}, "faults": ["PyTorch is left out of a dry run"]}
        if not args.dry_run:
            with record.attempt("PyTorch"), progress.stage("PyTorch", "all", TORCH_SECONDS + 30):
                peer = torch_times([torch_layer(*line) for line in lines])
        record.figures(torch=peer)
    peer = record.values["torch"]
    done = {row["entry"] for row in record.rows}
    for conv, dtype in lines:
        name = line_name(conv, dtype)
        if name in done:
            continue
        layer = machine.scaled(transpose(conv, dtype))
        effort = QUICK if args.quick else Effort()
        measurement = Measurement(machine, progress, name, layer, effort)
        measurement.run(with_lax=dtype == "bfloat16")
        for which, row in measurement.rows.items():
            own, other = row["us"].get("jaxcudnn"), peer["us"].get(name, {}).get(which)
            if own and other:
                row["us"]["torch"] = other
                row["torch_ratio"] = own / other
        record_rows(record, measurement)


def is_chosen(name: str, args: argparse.Namespace, quick: Sequence[str]) -> bool:
    """Whether a line is to be measured."""
    if args.entry:
        return any(part in name for part in args.entry)
    return not args.quick or name in quick


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    description = (__doc__ or "").split("\n")[0]
    parser = options(description, Path("reports/reported.json"), [*TIMEOUTS])
    parser.add_argument(
        "--entry",
        action="append",
        help="only those with this in their name; may be repeated; the file keeps the others",
    )
    parser.add_argument("--resume", action="store_true", help="only what the file has no rows of")
    parser.add_argument("--faults", help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a report; return 1 if anything could not be measured, or is wrong."""
    args = parse(argv)
    if args.worker:
        work(args.worker, args)
        return 0
    return measure(args, [*TIMEOUTS], run_section)


if __name__ == "__main__":
    sys.exit(main())
