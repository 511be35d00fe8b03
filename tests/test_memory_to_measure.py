# SPDX-License-Identifier: Apache-2.0
"""The memory on which plans are measured ahead of time, here of a stand-in for a GPU."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxcudnn import _load, _plans

DEVICE, WANTED = 3, 1000


@pytest.fixture(name="given")
def measure_in(monkeypatch):
    """What `measure` gives the extension as address and size, with such statistics."""
    (owner,) = jax.local_devices(backend="cpu")[:1]

    def measure(stats: dict[str, int] | None, error: Exception | None = None) -> int:
        asked: list[Any] = []
        extension = SimpleNamespace(
            **{name: getattr(_load.native(), name) for name in dir(_load.native())}
            | {
                "bytes_to_measure": lambda device, **attributes: WANTED,
                "measure": lambda device, pointer, size, **attributes: asked.append(
                    (pointer, size)
                ),
            }
        )
        device = SimpleNamespace(local_hardware_id=DEVICE, memory_stats=lambda: stats)

        def zeros(size, dtype, device):
            assert device.local_hardware_id == DEVICE
            if error:
                raise error
            return jax.device_put(np.zeros(size, dtype), owner)

        with monkeypatch.context() as context:
            context.setattr(_load, "cudnn", lambda: extension)
            context.setattr(_plans, "save", lambda: None)
            context.setattr(jax, "local_devices", lambda backend: [device])
            context.setattr(_plans.jnp, "zeros", zeros)
            _plans.measure({"op": "fprop"}, DEVICE)
        ((pointer, size),) = asked
        assert (pointer != 0) == (size != 0)
        return size

    return measure


@pytest.mark.parametrize(
    ("stats", "size"),
    [
        (None, WANTED),
        ({}, WANTED),
        ({"bytes_limit": 0, "bytes_in_use": 700}, WANTED),
        ({"bytes_limit": 1700, "bytes_in_use": 700}, WANTED),
        ({"bytes_limit": 1699, "bytes_in_use": 700}, 999),
    ],
    ids=str,
)
def test_is_what_is_free_at_most(given, stats, size):
    assert given(stats) == size


def test_none_if_it_is_refused(given):
    assert given(None, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")) == 0
