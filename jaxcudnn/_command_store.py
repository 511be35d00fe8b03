# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxcudnn store`: look into the store of tuned choices, and carry it elsewhere."""

import argparse
import os
import sys
from typing import Any

from . import store

_ACTIONS = {
    "info": "say where the store is, what it holds and how large it is (the default)",
    "path": "print the store's file alone",
    "list": "print all choices, one a line",
    "clear": "forget all choices",
    "export": "write all choices to FILE, as lines of JSON",
    "import": "add the choices of FILE; of two for one convolution the faster stays",
}


def add(subparsers: Any) -> None:
    """Add the command to those of `python -m jaxcudnn`."""
    parser = subparsers.add_parser("store", help="inspect, clear, export or import tuned choices")
    parser.set_defaults(run=run, action="info")
    actions = parser.add_subparsers(metavar="ACTION")
    for name, text in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=run, action=name)
        if name in ("export", "import"):
            action.add_argument("file", metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say; return 1, with the reason on stderr, if that is not possible."""
    try:
        print(*_lines(args), sep="\n", flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _lines(args: argparse.Namespace) -> list[str]:
    if args.action == "export":
        return [f"{store.export(args.file)} choices written to {args.file}"]
    if args.action == "import":
        return [f"{store.import_(args.file)} choices of {args.file} were new, or faster"]
    if args.action == "clear":
        return [f"{store.clear()} choices forgotten"]
    if args.action == "list":
        return _table(store.entries())
    if args.action == "path":
        return [str(store.path() or "off")]
    return _info(store.info())


def _info(info: store.Info) -> list[str]:
    if info.path is None:
        return ["off, by the environment variable JAXCUDNN_STORE"]
    return [
        f"file: {info.path}",
        f"choices: {info.entries:,} of at most {info.max_entries:,}",
        f"size: {info.bytes:,} bytes",
        *(f"set aside, corrupt: {aside}" for aside in info.set_aside),
    ]


def _table(choices: list[store.Choice]) -> list[str]:
    heads = ("gpu", "cudnn", "us", "workspace", "tried", "ms spent", "plan", "key")
    rows: list[tuple[str, ...]] = [heads]
    for c in choices:
        numbers = f"{c.microseconds:.2f}", str(c.workspace), str(c.tried), f"{c.milliseconds:.1f}"
        rows.append((c.gpu, c.cudnn, *numbers, c.plan, c.key))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
