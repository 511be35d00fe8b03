# SPDX-License-Identifier: Apache-2.0
"""Runs Python in a new process, for what cannot be undone in this one."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jaxcudnn

PACKAGE = Path(jaxcudnn.__file__).resolve().parents[1]


def run_python(script: str, **environment: str) -> list[str]:
    """The lines that a script prints, with the `jaxcudnn` that this process has imported."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": str(PACKAGE)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()
