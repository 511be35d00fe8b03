# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxcudnn explain`: what becomes of the convolutions of a function."""

import argparse
import sys

from . import _command_target
from ._explain import explain
from ._measuring import require_device


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to a parser."""
    parser = subparsers.add_parser(
        "explain",
        help="show what becomes of every convolution of a function",
        description="Trace a function and print its convolutions: where they stand, and by which "
        "plan of cuDNN's they run, or why by none. JAXCUDNN_* variables set the options.",
    )
    _command_target.add_arguments(parser)
    parser.add_argument(
        "--measure", action="store_true", help="time plans whose times are not known, on a GPU"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; 2 if there is nothing to trace, 1 if there is no GPU to measure on."""
    try:
        fn, arguments = _command_target.load(args)
        if args.measure:
            require_device("jaxcudnn explain --measure")
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    print(explain(fn, measure=args.measure)(*arguments))
    return 0
