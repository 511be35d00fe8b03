# SPDX-License-Identifier: Apache-2.0
"""Download what a build needs from the package index, and check that it is not too much.

That is build-system.requires of pyproject.toml with everything it requires, CMake and Ninja, which
scikit-build-core adds where a machine has none, and the wheel of cuDNN's headers.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 250e6  # bytes

sys.path.append(str(ROOT / "cmake"))


def requirements() -> list[str]:
    """What pip installs before a build."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return [*tomllib.load(file)["build-system"]["requires"], "cmake", "ninja"]


def download(arguments: list[str]) -> dict[str, int]:
    """Name and size of each file that pip downloads."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "-d", folder, *arguments]
        subprocess.run(command, check=True)
        return {path.name: path.stat().st_size for path in Path(folder).iterdir()}


def main() -> int:
    """Print every file and the sum; return 1 if that is over the limit."""
    from fetch_cudnn_headers import REQUIREMENT

    headers = REQUIREMENT.split()[0]
    sizes = download(requirements()) | download(["--no-deps", headers])
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:8.1f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:8.1f} MB in all, of at most {LIMIT / 1e6:.0f}")
    return 1 if total > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
