# SPDX-License-Identifier: Apache-2.0
"""What programs are lowered to for CUDA: whose convolutions are in the text."""

from typing import Any, NamedTuple

import jax

from jaxcudnn import _load


class Count(NamedTuple):
    """How many convolutions of a program are whose."""

    ours: int
    xla: int


def text(f: Any, *arguments: Any, platforms: tuple[str, ...] = ("cuda",)) -> str:
    """The program of a function, under `jax.jit` or not, before XLA sees it."""
    if not hasattr(f, "trace"):
        function = f
        f = jax.jit(lambda *given: function(*given))  # so that nothing is remembered of it
    return f.trace(*arguments).lower(lowering_platforms=platforms).as_text()


def count(program: str) -> Count:
    """Count in a program's text, where a function that is called often stands once."""
    return Count(program.count(f"@{_load.TARGET}("), program.count("stablehlo.convolution("))


def convolutions(f: Any, *arguments: Any) -> Count:
    """Count the convolutions of a function."""
    return count(text(f, *arguments))
