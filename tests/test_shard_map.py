# SPDX-License-Identifier: Apache-2.0
"""Runs `four_devices.py` in its own process, since JAX's start fixes the number of devices."""

import os
import subprocess
import sys
from pathlib import Path

from processes import PACKAGE


def test_four_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "four_devices.py"],
        cwd=Path(__file__).parent,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
