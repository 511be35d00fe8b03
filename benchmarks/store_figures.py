# SPDX-License-Identifier: Apache-2.0
"""How long the store of tuned choices takes to find a choice, to find none, and to keep one.

    python benchmarks/store_figures.py

It needs no GPU. The store is made in a temporary folder, in `--folder` if the file system matters.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jaxcudnn import store


def choice(number: int) -> store.Choice:
    """Give one with a key as long as a convolution's."""
    key = f"{number:06} {'k' * 400}"
    return store.Choice(key, "NVIDIA H200", "9.19.0", "eng5_k2=0", 12.5, 1 << 20, 30, 120.0)


def times(
    function: Callable[[store.Choice], object], choices: Iterable[store.Choice]
) -> list[float]:
    """Time a function of one choice, in microseconds."""
    each = []
    for one in choices:
        start = time.perf_counter()
        function(one)
        each.append(1e6 * (time.perf_counter() - start))
    return each


def get(one: store.Choice) -> store.Choice | None:
    return store.get(one.key, one.gpu, one.cudnn)


def measure(entries: int, repeats: int) -> dict[str, list[float]]:
    """Time the three in a store that holds `entries` choices."""
    store.put(map(choice, range(entries)))
    known = [choice(number * entries // repeats) for number in range(repeats)]
    new = [choice(entries + number) for number in range(repeats)]
    if not all(map(get, known)) or any(map(get, new)):
        raise RuntimeError("the store does not hold what was put into it")
    return {
        "get, found": times(get, known),
        "get, not found": times(get, new),
        "put, one": times(lambda one: store.put([one]), new),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=1_000)
    parser.add_argument("--folder", type=Path, help="where the store is made")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        os.environ["JAXCUDNN_STORE"] = str(Path(folder, "choices.sqlite3"))
        figures = measure(args.entries, args.repeats)
    print(f"{args.entries} entries, {args.repeats} repeats")
    for name, each in figures.items():
        median, slow = statistics.median(each), statistics.quantiles(each, n=100)[98]
        print(f"{name:14}  median {median:8.1f} us  99th percentile {slow:8.1f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
