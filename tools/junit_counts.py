# SPDX-License-Identifier: Apache-2.0
"""Count the tests in pytest's JUnit files.

`python tools/junit_counts.py FILE...` ends with `N passed, N failed, N skipped`. With
`--skips-allowed REGEX` each other skip counts as a failure and is printed: a test that should have
run here did not.
"""

import argparse
import re
import sys
from pathlib import Path
from xml.etree import ElementTree


def outcomes(text: str, skips_allowed: str = "") -> tuple[int, int, list[str]]:
    """(passed, skipped, what failed) in the text of a JUnit file.

    Args:
      text: the XML that `pytest --junitxml` wrote.
      skips_allowed: a regular expression; a skip whose reason it does not match is a failure.
    """
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif skip is None:
            passed += 1
        elif re.search(skips_allowed, skip.get("message", "")):
            skipped += 1
        else:
            failed.append(f"{name}: skipped: {skip.get('message', '')}")
    return passed, skipped, failed


def main(argv: list[str] | None = None) -> int:
    """Command line; exits with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--skips-allowed", default="", metavar="REGEX")
    arguments = parser.parse_args(argv)
    counts = [outcomes(file.read_text(), arguments.skips_allowed) for file in arguments.files]
    failed = [name for _, _, names in counts for name in names]
    print("".join(f"{name}\n" for name in failed), end="")
    passed, skipped = sum(count[0] for count in counts), sum(count[1] for count in counts)
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
