# SPDX-License-Identifier: Apache-2.0
"""The plans of custom calls on this process's GPUs: known, listed, measured and remembered.

Attributes are those of the custom call, as `_lowering` writes them. A plan that has to be measured
is measured where the program first runs, by the extension, which has no part in the store: what
the store knows is told to it before, and what it found is taken from it now and then.
"""

import atexit
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from . import _load, store
from ._options import ALGORITHMS

Attributes = dict[str, Any]

_MEASURED = tuple(name for name in ALGORITHMS if name != "heuristic")
_SECONDS_BETWEEN_SAVES = 0.5
_one_at_a_time = threading.Lock()  # filling memory for one would disturb the timing of another

_saving = threading.Lock()
_unsaved: list[store.Choice] = []
"""What the extension no longer has and the store not yet: `store.put` may raise, if warnings do."""


def workspace(attributes: Attributes, device: int, *, is_last: bool = True) -> int | None:
    """Give the bytes of scratch memory that a program has to reserve, or None without a plan.

    It is what the plan needs, or any of the candidates if one is chosen by measuring, also when it
    is known: a program is the same whatever was measured, so that JAX's persistent cache has it and
    the processes of one job agree. For the same reason only a process that is alone in its job
    heeds that no candidate was right when they were measured.

    Args:
        attributes: those of the call.
        device: CUDA's number of the GPU.
        is_last: whether the user is told if there is none, since nothing else will be asked for.

    Raises:
        ValueError: the options name a plan that there is not, or forbid all that there are.
        RuntimeError: cuDNN is missing, or it or the GPU failed.
    """
    extension = _load.cudnn()
    try:
        with _translated():
            if attributes["algorithm"] not in _MEASURED:
                return known(attributes, device).workspace_size
            _recall(extension.choice_key(**attributes), device)
            _save_from_now_on()
            if jax.process_count() == 1:
                known(attributes, device)
            return extension.largest_workspace(device, **attributes)
    except extension.UnsupportedError:
        if is_last:
            _refuse_if_only_nondeterministic(attributes, device)
        return None
    except extension.ExhaustedError as error:
        if not is_last:
            return None
        _refuse_if_only_nondeterministic(attributes, device)
        warnings.warn(
            f"jaxcudnn: {error}. XLA computes it instead, unless workspace_limit is raised",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def known(attributes: Attributes, device: int) -> Any:
    """Give the plan that a call will use, or None if it has to be measured first.

    Raises:
        ValueError: the options name a plan that there is not.
        RuntimeError: cuDNN is missing, or it or the GPU failed; or `UnsupportedError` or
            `ExhaustedError` of the extension, if there is no plan.
    """
    extension = _load.cudnn()
    if attributes["algorithm"] in _MEASURED:
        _recall(extension.choice_key(**attributes), device)
    with _translated():
        return extension.known_plan(device, **attributes)


def candidates(attributes: Attributes, device: int) -> list[Any]:
    """Give every plan that would be timed, in cuDNN's order; none if cuDNN has none.

    Raises:
        RuntimeError: cuDNN is missing, or it or the GPU failed.
    """
    extension = _load.cudnn()
    try:
        with _translated():
            return extension.candidates(device, **attributes)
    except (extension.UnsupportedError, extension.ExhaustedError):
        return []


def measure(attributes: Attributes, device: int) -> Any:
    """Time the candidates now, on memory from JAX's pool.

    The fastest is remembered and stored if the algorithm is one that measures.

    Raises:
        RuntimeError: as `known`.
    """
    extension = _load.cudnn()
    with _one_at_a_time, _translated():
        wanted = extension.bytes_to_measure(device, **attributes)
        memory = _memory(wanted, device)
        pointer, size = (0, 0) if memory is None else (memory.unsafe_buffer_pointer(), memory.size)
        tuning = extension.measure(device, pointer, size, **attributes)
    save()
    return tuning


def save() -> None:
    """Put into the store what was measured since the last time, or could not be put there then."""
    with _saving:
        records = _load.native().take_choices()
        cudnn = _version() if records else ""
        _unsaved.extend(
            store.Choice(
                key=record.key,
                gpu=record.gpu,
                cudnn=cudnn,
                plan=record.plan,
                microseconds=record.microseconds,
                workspace=record.workspace,
                tried=record.tried,
                milliseconds=record.milliseconds,
                reserved=record.reserved,
            )
            for record in records
        )
        if _unsaved:
            store.put(_unsaved)
            _unsaved.clear()


def forget() -> None:
    """Make the store be asked again."""
    _recall.cache_clear()


@cache
def _recall(key: str, device: int) -> None:
    """Tell the extension what the store knows, which it is asked once a process."""
    extension = _load.native()
    gpu = extension.device_name(device)
    stored = store.get(key, gpu, _version())
    if stored is not None:
        extension.remember_choice(
            extension.Choice(
                key=key,
                gpu=gpu,
                plan=stored.plan,
                microseconds=stored.microseconds,
                workspace=stored.workspace,
                tried=stored.tried,
                milliseconds=stored.milliseconds,
                reserved=stored.reserved,
            )
        )


def _version() -> str:
    """Give the version of the cuDNN in use: 9.19.0 for 91900."""
    number = _load.native().cudnn_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@lru_cache(maxsize=1)
def _save_from_now_on() -> None:
    """Start the thread that stores what is measured; no step of a program waits for the store."""
    stop = threading.Event()
    owner = os.getpid()

    def run() -> None:
        while not stop.wait(_SECONDS_BETWEEN_SAVES):
            save()

    def finish() -> None:
        if os.getpid() != owner:  # a forked process, which has neither the thread nor its locks
            return
        stop.set()
        thread.join()
        save()

    thread = threading.Thread(target=run, name="jaxcudnn-store", daemon=True)
    thread.start()
    atexit.register(finish)


def _memory(size: int, device: int) -> jax.Array | None:
    """Give an array of so many bytes on a device, or of those that are free; None if none are.

    More than are free are not asked for, since XLA takes ten seconds to refuse them.
    """
    devices = jax.local_devices(backend="cuda")
    owner = next(each for each in devices if each.local_hardware_id == device)
    stats = owner.memory_stats() or {}
    if stats.get("bytes_limit"):  # not every allocator has one
        size = max(0, min(size, stats["bytes_limit"] - stats["bytes_in_use"]))
    try:
        return jax.block_until_ready(jnp.zeros(size, jnp.uint8, device=owner))
    except jax.errors.JaxRuntimeError:
        return None


def _refuse_if_only_nondeterministic(attributes: Attributes, device: int) -> None:
    """Raise rather than leave to XLA, which promises nothing, what should be deterministic."""
    if not attributes["deterministic"]:
        return
    extension = _load.native()
    try:
        free = attributes | {"deterministic": False, "algorithm": "heuristic"}
        others = extension.known_plan(device, **free).name
    except extension.UnsupportedError:
        return
    except extension.ExhaustedError:
        others = "none either within workspace_limit, and others beyond it"
    raise ValueError(
        f"jaxcudnn: a deterministic plan must exist where options ask for one, got none for a "
        f"{attributes['op']} of x {attributes['x']} and w {attributes['w']}, for which cuDNN has "
        f"{others}; raise workspace_limit, or set deterministic to False for this call"
    )


@contextmanager
def _translated() -> Iterator[None]:
    """Turn the extension's failures into Python's; refusals go through as they are."""
    extension = _load.native()
    try:
        yield
    except (extension.UnsupportedError, extension.ExhaustedError):
        raise
    except extension.InvalidError as error:
        raise ValueError(f"jaxcudnn: {error}") from error
    except extension.NativeError as error:
        raise RuntimeError(f"jaxcudnn: {error}") from error
