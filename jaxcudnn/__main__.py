# SPDX-License-Identifier: Apache-2.0
"""The command line, `python -m jaxcudnn`: one module of the package for each command."""

import argparse
import sys
from collections.abc import Sequence

from . import _command_doctor, _command_explain, _command_store, _command_tune

_COMMANDS = (_command_explain, _command_tune, _command_store, _command_doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and give the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxcudnn", description="Convolutions for JAX, computed by cuDNN."
    )
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for command in _COMMANDS:
        command.add(subparsers)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
