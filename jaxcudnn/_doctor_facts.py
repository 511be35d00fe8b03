# SPDX-License-Identifier: Apache-2.0
"""What is installed on this machine and loaded into this process, as far as that can be seen.

Nothing here judges what it finds, and nothing here fails because something is missing.
"""

import ctypes
import importlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from . import _load

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""JAX's plugins for CUDA; each goes with another distribution, of the same name with 'pjrt'."""

_CUDNN = "libcudnn.so.9"


@dataclass(frozen=True)
class Library:
    """A shared library in this process: which file it is, and how it got there."""

    path: str
    how: str


@dataclass(frozen=True)
class Cudnn:
    """The cuDNN that jaxcudnn uses, or why it uses none, and those that it does not use."""

    library: Library | None
    error: str = ""
    version: int = 0
    oldest: int = 0
    """The oldest version that the extension takes."""
    compiled: int = 0
    """The version of the headers that the extension was compiled with."""
    plugin: int = 0
    """The version that JAX's plugin was compiled with, and the oldest that it takes; 0: unknown."""
    others: tuple[str, ...] = ()
    """Further copies in the process; where none is used, those that are not from a wheel."""
    on_path: tuple[str, ...] = ()
    """Further copies in the folders of LD_LIBRARY_PATH."""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver: what its library says of itself and of the GPUs."""

    error: str = ""
    """Why its library did not load."""
    cuda: int = 0
    """The newest CUDA that it runs: 13000 is 13.0."""
    status: int = 0
    """What cuInit returned."""
    memories: tuple[int, ...] = ()
    """Bytes of each GPU."""
    release: str = ""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that JAX has, or why it has none."""

    devices: tuple[Any, ...]
    reason: str = ""


def versions() -> dict[str, str]:
    """Give the versions of the distributions that are installed, of those that matter."""
    pjrt = (name.replace("plugin", "pjrt") for name in PLUGINS)
    found = {}
    for name in ("jaxcudnn", "jax", "jaxlib", *PLUGINS, *pjrt):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def plugins(versions: Iterable[str]) -> list[str]:
    """Give JAX's plugins for CUDA among the names of distributions."""
    return [name for name in PLUGINS if name in versions]


def platforms() -> str | None:
    """Give JAX's option `jax_platforms`."""
    config: Any = jax.config  # jax 0.10 has no type for this one
    return config.jax_platforms


def wants_cuda(platforms: str | None) -> bool:
    """Say whether JAX may use CUDA, by its option `jax_platforms`."""
    return not platforms or bool({"cuda", "gpu"} & set(platforms.split(",")))


def start_jax() -> Gpus:
    """Make JAX look for GPUs, and keep what it says about those that it cannot use."""
    logger, said = logging.getLogger("jax"), _Said()
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [said], False
    try:
        return Gpus(tuple(jax.local_devices(backend="cuda")))
    except RuntimeError as error:
        return Gpus((), said.reason or str(error).strip().splitlines()[0])
    finally:
        logger.handlers, logger.propagate = handlers, propagate


class _Said(logging.Handler):
    """Keeps the error that JAX logs where a plugin does not start, which JAX then does without."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            lines = [line for line in str(record.exc_info[1]).splitlines() if line.strip()]
            self.reason = " ".join(lines[:4])


def driver(name: str = "libcuda.so.1") -> Driver:
    """Ask NVIDIA's driver about itself and the GPUs, which takes none of their memory."""
    try:
        cuda = ctypes.CDLL(name)
    except OSError as error:
        return Driver(error=str(error))
    version, count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    status = cuda.cuInit(0)
    memories = []
    if status == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
        for number in range(count.value):
            cuda.cuDeviceGet(ctypes.byref(device), number)
            cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
            memories.append(size.value)
    release = Path("/sys/module/nvidia/version")
    return Driver(
        cuda=version.value,
        status=status,
        memories=tuple(memories),
        release=release.read_text().strip() if release.exists() else "",
    )


def library(names: Sequence[str], before: Iterable[str]) -> Library | None:
    """Find the first library of these names, loading it if it is nowhere in the process.

    Args:
      names: such as 'libnvrtc.so.13'.
      before: the files that were in the process once JAX had started.
    """
    for flags in (os.RTLD_NOLOAD | os.RTLD_NOW, os.RTLD_NOW):
        for name in names:
            try:
                ctypes.CDLL(name, mode=flags)
            except OSError:
                continue
            return located(next(iter(mapped(name)), name), before)
    return None


def located(path: str, before: Iterable[str]) -> Library:
    """Say how a library got into the process."""
    if os.path.realpath(path) in map(os.path.realpath, before):
        how = "in the process already"
    elif _is_in_a_wheel(path):
        how = "from NVIDIA's wheels"
    else:
        how = "found by the linker"
    return Library(path, how)


def _is_in_a_wheel(path: str) -> bool:
    """Say whether a file is where NVIDIA's wheels unpack."""
    folders = map(os.path.realpath, _load._nvidia_folders())
    return any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in folders)


def mapped(name: str = "", maps: str = "/proc/self/maps") -> list[str]:
    """Give the files in this process: all, or those of a library and its patch releases."""
    rows = (line.split(maxsplit=5) for line in Path(maps).read_text().splitlines())
    paths = dict.fromkeys(row[5] for row in rows if len(row) > 5 and row[5].startswith("/"))
    pattern = re.compile(rf"{re.escape(name)}(\.|$)" if name else "")
    return [path for path in paths if pattern.match(Path(path).name)]


def cudnn(native: Any, before: Iterable[str], plugins: Sequence[str]) -> Cudnn:
    """Load cuDNN as a convolution does, and look for copies that may get in its way.

    Args:
      native: the extension.
      before: as of `library`.
      plugins: JAX's, of which the first is started.
    """
    known = {
        "oldest": native.oldest_cudnn(),
        "compiled": native.cudnn_compiled_version(),
        "plugin": _cudnn_of_plugin(plugins[0]) if plugins else 0,
    }
    try:
        _load.cudnn()
    except RuntimeError as error:
        foreign = [copy for copy in mapped(_CUDNN) if not _is_in_a_wheel(copy)]
        text = str(error).removeprefix("jaxcudnn: ")
        return Cudnn(None, error=text, others=tuple(foreign), **known)
    path = native.cudnn_path()
    return Cudnn(
        located(path, before),
        version=native.cudnn_version(),
        others=other_copies(path, mapped(_CUDNN)),
        on_path=other_copies(path, copies_on_path(os.environ.get("LD_LIBRARY_PATH", ""))),
        **known,
    )


def other_copies(path: str, copies: Iterable[str]) -> tuple[str, ...]:
    """Give those files that are not the one at `path`."""
    return tuple(copy for copy in copies if os.path.realpath(copy) != os.path.realpath(path))


def copies_on_path(folders: str) -> list[str]:
    """Give the cuDNNs in folders that are written as in LD_LIBRARY_PATH."""
    files = [Path(folder, _CUDNN) for folder in folders.split(os.pathsep) if folder]
    return [str(file) for file in files if file.exists()]


def _cudnn_of_plugin(plugin: str) -> int:
    """Give the version of cuDNN that a plugin was compiled with, or 0 if it does not say."""
    try:
        module = importlib.import_module(f"{plugin.replace('-', '_')}._versions")
        return module.cudnn_build_version()
    except (ImportError, AttributeError):
        return 0


def cublaslt_version(library: Library | None) -> int:
    """Give the version of cuBLASLt: 130601 is 13.6.1. 0 if there is none."""
    if library is None:
        return 0
    function = ctypes.CDLL(library.path).cublasLtGetVersion
    function.restype = ctypes.c_size_t
    return function()


def compute_capability(gpus: Gpus) -> int:
    """Give the compute capability of the first GPU as one number: 90 is 9.0. 0 without one."""
    if not gpus.devices:
        return 0
    major, minor = gpus.devices[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)


def ffi_of_jaxlib(folder: str | None = None) -> tuple[int, int] | None:
    """Give (major, minor) of the XLA FFI that jaxlib speaks, as its headers say."""
    header = Path(folder or jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    if not header.exists():
        return None
    found = re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text())
    numbers = {name: int(number) for name, number in found}
    return (numbers["MAJOR"], numbers["MINOR"]) if len(numbers) == 2 else None
