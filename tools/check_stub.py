# SPDX-License-Identifier: Apache-2.0
"""Compare jaxcudnn/_native.pyi with what nanobind's stubgen says about the installed extension.

`python tools/check_stub.py` exits with 1 and prints the difference; `--write` writes the stub anew.
"""

import argparse
import difflib
import importlib
import os
import sys
from pathlib import Path

STUB = Path(__file__).resolve().parents[1] / "jaxcudnn" / "_native.pyi"
HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Written by tools/check_stub.py --write from the installed extension.
"""


def generate(module: str) -> str:
    """The text of the stub for the extension `module`, such as 'jaxcudnn._native'."""
    # Here, so that the tool's text can be tested where nanobind is not installed.
    from nanobind.stubgen import StubGen

    generator = StubGen(importlib.import_module(module))
    generator.put(generator.module)
    return HEADER + "\n" + generator.get().strip() + "\n"


def difference(committed: str, generated: str) -> str:
    """A unified diff from the committed to the generated stub; empty when they are equal."""
    return "".join(
        difflib.unified_diff(
            committed.splitlines(keepends=True),
            generated.splitlines(keepends=True),
            "committed",
            "generated",
        )
    )


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the stub instead")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    generated = generate("jaxcudnn._native")
    if arguments.write:
        STUB.write_text(generated)
    changes = difference(STUB.read_text() if STUB.is_file() else "", generated)
    print(changes, end="")
    print(f"{STUB.name}: {'not what the extension has; run with --write' if changes else 'ok'}")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
