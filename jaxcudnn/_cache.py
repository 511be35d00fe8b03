# SPDX-License-Identifier: Apache-2.0
"""The process-wide cache of plans, for who wants to watch or empty it."""

from typing import NamedTuple

from . import _load, _plans


class CacheInfo(NamedTuple):
    """What the cache of plans holds and has done since it was last cleared.

    Attributes:
        hits: look-ups that found a plan.
        misses: look-ups that had to build or measure one.
        builds: misses that gave a plan.
        evictions: plans dropped for newer ones, the least recently used first. A plan that a
            compiled program uses lives as long as that.
        size: how many plans there are.
        capacity: how many there may be.
        bytes: host memory that malloc gave out while they were built, by whichever thread.
        seconds: spent building and measuring.
    """

    hits: int
    misses: int
    builds: int
    evictions: int
    size: int
    capacity: int
    bytes: int
    seconds: float


def cache_info() -> CacheInfo:
    """Say what the cache of plans holds.

    Raises:
        RuntimeError: the extension did not load.

    Example:
        >>> import jaxcudnn
        >>> jaxcudnn.cache_info().capacity
        4096
    """
    extension = _load.native()
    info = extension.cache_info()
    return CacheInfo(
        info.hits,
        info.misses,
        info.builds,
        info.evictions,
        info.size,
        info.capacity,
        extension.cache_bytes(),
        info.seconds,
    )


def clear_cache() -> None:
    """Forget all plans and choices of this process; the store keeps what it has.

    A program that has been compiled keeps its plans. The next ones look their choices up in the
    store again, or measure.

    Raises:
        RuntimeError: the extension did not load.
    """
    _plans.save()
    _load.native().clear_cache()
    _plans.forget()
