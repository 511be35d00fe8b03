# SPDX-License-Identifier: Apache-2.0
"""Say whether a GPU test report is of the present tree and shows that every GPU test passed.

`python tools/check_gpu_report.py [PATH]`, PATH being reports/gpu.json unless given. The last line
is the verdict; the exit status is 0 for a good report and 1 for any other. With `--other-tree`, a
report of another tree passes if nothing else is wrong with it: for where there is no GPU to renew
it, so that what it shows is still checked.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tree_hash import tree_sha256

ROOT = Path(__file__).resolve().parents[1]
REMAKE = "make it anew on a GPU: pytest -m gpu --gpu-report reports/gpu.json"


def faults(report: dict[str, Any], tree: str) -> list[str]:
    """What is wrong with `report` for a tree whose hash is `tree`; empty when it is good."""
    found = []
    if report["tree_sha256"] != tree:
        found.append(
            f"it is of another tree (report {report['tree_sha256'][:12]}, present {tree[:12]})"
        )
    if not report["gpu"]:
        found.append("it was made without a GPU")
    if not report["complete"]:
        found.append("it is of a part of the GPU tests")
    for outcome in ("failed", "skipped"):
        if report[outcome]:
            found.append(f"{report[outcome]} {outcome}")
    if not report["passed"]:
        found.append("no test passed")
    return found


def verdict(path: Path, root: Path, *, other_tree: bool = False) -> tuple[bool, str]:
    """Whether the report at `path` is good for the tree at `root`, and one line that says why."""
    try:
        report = json.loads(path.read_text())
        present = report["tree_sha256"] == tree_sha256(root)
        found = faults(report, report["tree_sha256"] if other_tree else tree_sha256(root))
    except OSError as error:
        return False, f"{path}: no GPU report ({error.strerror}); {REMAKE}"
    except (KeyError, TypeError, ValueError) as error:
        return False, f"{path}: not a GPU report ({type(error).__name__}: {error}); {REMAKE}"
    if found:
        return False, f"{path}: not a good report of the present tree: {', '.join(found)}; {REMAKE}"
    tree = "the present" if present else "ANOTHER"
    return True, (
        f"{path}: of {tree} tree, {report['passed']} passed, 0 failed, 0 skipped on "
        f"{report['gpu']} (driver {report['driver']}, cuDNN {report['cudnn']}, "
        f"jax {report['jax']}, Python {report['python']})"
    )


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("path", nargs="?", type=Path, default=Path("reports/gpu.json"))
    parser.add_argument("--other-tree", action="store_true", help="accept one of another tree")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree (default: this one)")
    arguments = parser.parse_args(argv)
    good, line = verdict(
        arguments.root / arguments.path, arguments.root, other_tree=arguments.other_tree
    )
    print(line)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
