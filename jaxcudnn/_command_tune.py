# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxcudnn tune`: measures the convolutions of a function ahead of time."""

import argparse
import sys

from . import _command_target
from ._measuring import require_device
from ._tune import tune


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to a parser."""
    parser = subparsers.add_parser(
        "tune",
        help="measure the plans of every convolution of a function, and store the choices",
        description="Trace a function, measure cuDNN's plans for each of its convolutions that is "
        "new, and print the choices. JAXCUDNN_* variables set the options.",
    )
    _command_target.add_arguments(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was chosen; 2 if there is nothing to trace, 1 if not all could be measured."""
    try:
        require_device("jaxcudnn tune")
        fn, arguments = _command_target.load(args)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    tuned = tune(fn, *arguments, progress=not args.quiet)
    print(tuned)
    return 1 if tuned.failed else 0
