# SPDX-License-Identifier: Apache-2.0
# Written by tools/check_stub.py --write from the installed extension.

"""
cuDNN plans for convolutions, and the XLA custom call that executes them.
"""

from collections.abc import Sequence
from typing import Any


class NativeError(RuntimeError):
    pass

class UnsupportedError(NativeError):
    pass

class ExhaustedError(NativeError):
    pass

class InvalidError(NativeError):
    pass

def registrations() -> dict[str, dict[str, Any]]:
    """
    Custom-call targets by name, each a dictionary of stages for jax.ffi.register_ffi_target.
    """

def types() -> dict[str, Any]:
    """State types by name, for jax.ffi.register_ffi_type."""

def schema() -> int:
    """
    The schema of the custom call's attributes that programs are written with.
    """

def ffi_api_version() -> tuple[int, int]:
    """(major, minor) of the XLA FFI that the handlers were compiled against."""

def check_not_forked() -> None:
    """
    Raises in a process that was forked from one in which CUDA had started.
    """

def load_cudnn(paths: Sequence[str]) -> None:
    """
    Finds cuDNN: the copy in the process, else each path, else the dynamic linker's.
    """

def cudnn_version() -> int:
    """The version of the cuDNN in use: 91900 is 9.19.0."""

def cudnn_compiled_version() -> int:
    """
    The version of the cuDNN whose headers this extension was compiled with.
    """

def oldest_cudnn() -> int:
    """The oldest cuDNN that load_cudnn accepts."""

def cudnn_path() -> str:
    """The file of the cuDNN in use."""

class Plan:
    """A cuDNN execution plan."""

    @property
    def name(self) -> str:
        """Engine and knobs, such as 'eng62_k2=0_k13=1'."""

    @property
    def workspace_size(self) -> int:
        """Bytes of scratch memory it needs."""

    @property
    def notes(self) -> list[str]:
        """cuDNN's numerical and behaviour notes."""

    @property
    def source(self) -> str:
        """How it was chosen: 'heuristic', 'named', 'measured' or 'stored'."""

    @property
    def microseconds(self) -> float:
        """What it took when it was chosen; NaN if it was not timed."""

    @property
    def tried(self) -> int:
        """How many plans were timed to choose it."""

class Timing:
    """What a plan took, or why that is not known."""

    @property
    def name(self) -> str: ...

    @property
    def microseconds(self) -> float:
        """Of one run; NaN if it was not timed."""

    @property
    def reason(self) -> str:
        """Why it was not timed, or is refused; else empty."""

class Tuning:
    """What measuring found."""

    @property
    def plan(self) -> Plan: ...

    @property
    def timings(self) -> list[Timing]: ...

    @property
    def milliseconds(self) -> float:
        """What measuring cost."""

def known_plan(device: int, **attributes: Any) -> Plan | None:
    """
    The plan that a custom call will use on a device of this process, if that is known without measuring.
    """

def candidates(device: int, **attributes: Any) -> list[Plan]:
    """
    Every plan that measuring would time for a custom call, in cuDNN's order.
    """

def largest_workspace(device: int, **attributes: Any) -> int:
    """The most bytes of scratch memory that one of the candidates needs."""

def bytes_to_measure(device: int, **attributes: Any) -> int:
    """How much device memory `measure` needs to time all candidates."""

def measure(device: int, memory: int, bytes: int, **attributes: Any) -> Tuning:
    """
    Times the candidates in device memory that nothing else uses, and remembers the fastest where the algorithm is one that measures.
    """

def plan_from_properties(properties_json: str, alignment: int = 16, **attributes: Any) -> Plan:
    """
    The named or first plan for a GPU described by cuDNN's JSON, which need not exist: for tests of planning.
    """

def candidates_from_properties(properties_json: str, **attributes: Any) -> list[Plan]:
    """The same of `candidates`."""

class Choice:
    """A measured choice, and what it was made for."""

    def __init__(self, *, key: str, gpu: str, plan: str, microseconds: float, workspace: int, tried: int, milliseconds: float, reserved: int) -> None: ...

    @property
    def key(self) -> str: ...

    @property
    def gpu(self) -> str: ...

    @property
    def plan(self) -> str: ...

    @property
    def microseconds(self) -> float: ...

    @property
    def workspace(self) -> int: ...

    @property
    def tried(self) -> int: ...

    @property
    def milliseconds(self) -> float: ...

    @property
    def reserved(self) -> int: ...

def choice_key(**attributes: Any) -> str:
    """The text under which the choice for a custom call is stored."""

def device_name(device: int) -> str:
    """The driver's name of a GPU."""

def remember_choice(choice: Choice) -> None:
    """Takes in a choice that was stored by another process."""

def take_choices() -> list[Choice]:
    """The choices measured since the last call."""

class KnownFault:
    """Plans that are never used, and why, in words."""

    @property
    def op(self) -> str:
        """'fprop', 'dgrad', 'wgrad' or 'any'."""

    @property
    def engine(self) -> str:
        """'eng1', or which engines."""

    @property
    def sm(self) -> str:
        """Compute capabilities: '86' is 8.6."""

    @property
    def cudnn(self) -> str:
        """Versions."""

    @property
    def cublaslt(self) -> str:
        """Versions."""

    @property
    def dtypes(self) -> str: ...

    @property
    def condition(self) -> str:
        """Of which convolutions."""

    @property
    def fault(self) -> str:
        """What is wrong."""

    @property
    def source(self) -> str:
        """Who says so."""

    def __str__(self) -> str: ...

def known_faults(*, sm: int = 0, cudnn: int = 0, cublaslt: int = 0) -> list[KnownFault]:
    """
    The plans that are never used on a GPU (90 is compute capability 9.0) with these libraries (91900 is 9.19.0, 130601 is 13.6.1); what is 0 may be any.
    """

class CacheInfo:
    """Counters of the plan cache."""

    @property
    def hits(self) -> int: ...

    @property
    def misses(self) -> int:
        """Look-ups that had to build."""

    @property
    def builds(self) -> int:
        """Look-ups that built a plan."""

    @property
    def evictions(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def seconds(self) -> float:
        """Spent building and measuring."""

def cache_info() -> CacheInfo:
    """Counters of the process-wide plan cache."""

def cache_bytes() -> int:
    """Host memory that the cached plans hold."""

def clear_cache() -> None:
    """Forgets every plan that no executable holds."""

def set_cache_capacity(capacity: int) -> None:
    """Sets how many plans are kept; the least recently used go first."""

def time_stages(on: bool) -> None:
    """
    Starts (forgetting earlier samples) or stops the clock in the handlers.
    """

def stage_samples() -> dict[str, list[int]]:
    """
    Host nanoseconds of the latest calls: of Initialize, of Execute as a whole, and of cuDNN's part of Execute.
    """
