# SPDX-License-Identifier: Apache-2.0
"""Choices for the tests of the store."""

from typing import Any

from jaxcudnn import store

GPU, CUDNN = "NVIDIA H200", "9.19.0"


def tuned(number: int, **changes: Any) -> store.Choice:
    """A choice whose every field tells its number, under a key as long as a convolution's."""
    fields: dict[str, Any] = {
        "key": key(number),
        "gpu": GPU,
        "cudnn": CUDNN,
        "plan": f"eng{number}_k2=0",
        "microseconds": number + 0.5,
        "workspace": number,
        "tried": number,
        "milliseconds": number + 0.25,
        "reserved": 2 * number,
    }
    return store.Choice(**fields | changes)


def key(number: int) -> str:
    return f"{number} " + "k" * 400


def get(number: int) -> store.Choice | None:
    return store.get(key(number), GPU, CUDNN)
