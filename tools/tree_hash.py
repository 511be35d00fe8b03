# SPDX-License-Identifier: Apache-2.0
"""One SHA-256 over the files that decide what a GPU test run means."""

import hashlib
from pathlib import Path

FOLDERS = ("csrc", "jaxcudnn", "tests")
# What building and running leave behind; hidden files and folders are left out as well.
LEFTOVER_FOLDERS = frozenset({"__pycache__", "build"})
LEFTOVER_SUFFIXES = frozenset({".o", ".pyc", ".so"})


def tree_files(root: Path) -> list[str]:
    """The files that count, relative to `root`, with forward slashes, sorted by code point."""
    names = []
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            relative = path.relative_to(root)
            leftover = (
                any(part.startswith(".") or part in LEFTOVER_FOLDERS for part in relative.parts)
                or path.suffix in LEFTOVER_SUFFIXES
            )
            if path.is_file() and not leftover:
                names.append(relative.as_posix())
    return sorted(names)


def tree_sha256(root: Path) -> str:
    """SHA-256 of the lines that `sha256sum` prints for `tree_files(root)`, in hexadecimal."""
    total = hashlib.sha256()
    for name in tree_files(root):
        digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        total.update(f"{digest}  {name}\n".encode())
    return total.hexdigest()
