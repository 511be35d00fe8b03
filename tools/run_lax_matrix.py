# SPDX-License-Identifier: Apache-2.0
"""Run JAX's own tests of convolutions on the CPU, all of them: `python tools/run_lax_matrix.py`.

There are 1.7 million cases, at some tens a second on one core; `--most 1000` runs at most so many
of each product of parameters, spread over it. Every case that fails is printed, and now and then
how far the run is; it ends with `N passed, N failed` and exits with 1 if any failed.
"""

import argparse
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS_BETWEEN_LINES = 30
CASES_BETWEEN_CLEARINGS = 500  # of what JAX remembers of programs, which would fill the memory

Run = tuple[Callable[[Any], None], Any]
"""A test, and the case that it is for."""


def runs(most: float) -> Iterator[Run]:
    """Every test with every case of it, up to so many of each product."""
    tests, matrix = (
        importlib.import_module("test_lax_matrix"),
        importlib.import_module("lax_matrix"),
    )
    for test, matrices, keep in (
        (tests.test_values, matrix.VALUES, None),
        (tests.test_derivatives, matrix.GRADIENTS, None),
        (tests.test_derivatives_against_differences, matrix.GRADIENTS, tests.is_differenced),
        (tests.test_vmap, matrix.VMAP, None),
    ):
        for each in matrices:
            for case in filter(keep or bool, each.draw(most)):
                yield test, case


def run(most: float, *, say: Callable[[str], None], clear: Callable[[], None]) -> tuple[int, int]:
    """Give how many passed and how many failed."""
    total = sum(1 for _ in runs(most))
    passed = failed = 0
    start = last = time.monotonic()
    for number, (test, case) in enumerate(runs(most), 1):
        try:
            test(case)
            passed += 1
        except Exception as error:
            failed += 1
            first, *_ = [*str(error).strip().splitlines(), ""]
            say(f"FAILED {test.__name__}[{case.name}] {type(error).__name__}: {first}")
        if number % CASES_BETWEEN_CLEARINGS == 0:
            clear()
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last, rate = now, number / (now - start)
            say(
                f"{number:,} of {total:,}: {passed:,} passed, {failed:,} failed, {rate:.1f} a "
                f"second, {(total - number) / rate / 3600:.1f} hours left"
            )
    return passed, failed


def main(argv: list[str] | None = None) -> int:
    """Command line; exits with 1 if a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--most", type=int, default=None, metavar="N", help="cases of a product")
    most = parser.parse_args(argv).most
    # The checkout comes last: an installed package, if there is one, is what is tested.
    sys.path += [str(ROOT / "tools"), str(ROOT / "tests"), str(ROOT)]
    importlib.import_module("conftest")  # JAX as the tests have it
    jax = importlib.import_module("jax")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passed, failed = run(
            float("inf") if most is None else most,
            say=lambda line: print(line, flush=True),
            clear=jax.clear_caches,
        )
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
