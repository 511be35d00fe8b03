# SPDX-License-Identifier: Apache-2.0
"""Measure training steps of whole networks on a GPU, by XLA, by cuDNN under `install`, by PyTorch.

    pip install ".[cuda13,examples,flax]"
    python benchmarks/models.py --output reports/models.json
    python benchmarks/report.py reports/models.json --write docs/models.md

docs/models.md says what is measured. Every network is trained by every implementation in a process
of its own, with a store of plans that is empty, and what has been measured is in the file as soon
as it is. PyTorch is measured if it is installed; `--implementation torch.compile` has its compiler,
too. `--dry-run` runs small networks on a CPU, for its own test.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from command import measure, options, run_in_process
from model_report import SECTIONS
from model_table import BY_DEFAULT, IMPLEMENTATIONS, MODELS, QUICK, Effort
from record import Record


def run_section(name: str, args: argparse.Namespace) -> None:
    """Run a section in a process of its own, with nothing in its store of plans."""
    seconds = IMPLEMENTATIONS[SECTIONS[name][1]]
    with tempfile.TemporaryDirectory() as folder:
        run_in_process(__file__, name, args, seconds, JAXCUDNN_STORE=str(Path(folder) / "choices"))


def work(name: str, args: argparse.Namespace) -> None:
    """Run a section in this process."""
    record = Record(args.output, name, fresh=False)
    model, implementation = SECTIONS[name]
    effort = QUICK if args.quick or args.dry_run else Effort()
    if implementation.startswith("torch"):
        with_torch(model, record, effort, compiled="compile" in implementation, small=args.dry_run)
    else:
        with_jax(model, record, effort, installed=implementation == "installed", small=args.dry_run)
    record.finish()


def with_torch(model: str, record: Record, effort: Effort, *, compiled: bool, small: bool) -> None:
    """Time a network in PyTorch, if it is installed."""
    if importlib.util.find_spec("torch") is None:
        record.failure(f"{model} by PyTorch, which is not installed")
        return
    import torch_step

    torch_step.measure(model, MODELS[model], record, effort, small=small, compiled=compiled)


def with_jax(model: str, record: Record, effort: Effort, *, installed: bool, small: bool) -> None:
    """Time a network in JAX."""
    import jax_step
    from machines import DryRun, Gpu

    import jaxcudnn

    machine = DryRun() if small else Gpu()
    record.environment(machine.environment())
    if installed:
        jaxcudnn.install()
    made = jax_step.training(model, MODELS[model], small=small)
    jax_step.measure(made, machine, record, effort)
    if installed:
        with record.attempt("explain"):
            jax_step.explain(made, record)
        jaxcudnn.uninstall()


def chosen(args: argparse.Namespace) -> list[str]:
    """Give the sections that the command line asks for."""
    implementations = args.implementation or BY_DEFAULT
    return [
        name
        for name, (model, implementation) in SECTIONS.items()
        if implementation in implementations and model in (args.model or MODELS)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a report; return 1 if anything could not be measured."""
    description = (__doc__ or "").split("\n")[0]
    parser = options(description, Path("reports/models.json"), [*SECTIONS])
    for name, choices in (("--model", MODELS), ("--implementation", IMPLEMENTATIONS)):
        parser.add_argument(
            name, action="append", choices=choices, help="only this one; may be repeated"
        )
    args = parser.parse_args(argv)
    if args.worker:
        work(args.worker, args)
        return 0
    return measure(args, args.section or chosen(args), run_section)


if __name__ == "__main__":
    sys.exit(main())
