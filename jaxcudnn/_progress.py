# SPDX-License-Identifier: Apache-2.0
"""How far a long task is, on stderr: a bar in a terminal, and lines elsewhere."""

import sys
from types import TracebackType
from typing import Any


class Progress:
    """So many steps, each told of when it is done.

    In a terminal it is tqdm's bar, if tqdm is installed; otherwise a line for each step.
    """

    def __init__(self, title: str, total: int, *, shown: bool = True) -> None:
        """Begin; show nothing if `shown` is False or there is nothing to do."""
        self._title, self._total, self._done = title, total, 0
        self._shown = shown and total > 0
        self._bar = _bar(title, total) if self._shown and sys.stderr.isatty() else None

    def step(self, text: str) -> None:
        """Say what has been done."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self._shown:
            line = f"{self._title} {self._done}/{self._total}: {text}"
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        """Give itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _bar(title: str, total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:  # it is not required
        return None
    return tqdm(total=total, desc=title, unit="conv", file=sys.stderr)
