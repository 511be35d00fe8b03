# SPDX-License-Identifier: Apache-2.0
"""The extension and cuDNN: finding both, and saying in one sentence why one is missing.

Nothing here runs CUDA at import. The custom call is registered at import all the same, so that a
program exported or cached by another process finds it.
"""

import ctypes
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import jax

try:
    from . import _native
except ImportError as error:
    _native, _import_error = None, error

TARGET = "jaxcudnn_conv_v1"
"""The custom call's name. The number grows when programs that were saved before could no longer be
read; both names are then registered. Attributes may be added without: see `SCHEMA`."""

SCHEMA = 2
"""The version of its attributes that programs are written with: csrc/attributes.h has them all."""

_CUDNN = "libcudnn.so.9"

# What cuDNN opens by name, in the wheels of either CUDA, the newer first.
_NEEDED_BY_CUDNN = (
    ("cu13/lib/libcublasLt.so.13", "cu13/lib/libnvrtc.so.13"),
    ("cublas/lib/libcublasLt.so.12", "cuda_nvrtc/lib/libnvrtc.so.12"),
)


def register() -> None:
    """Register the custom call with JAX, which hands it to the CUDA plugin when that loads."""
    if _native is None:
        return  # said at lowering, and only on CUDA: other platforms do without
    for name, type_info in _native.types().items():
        jax.ffi.register_ffi_type(name, type_info, platform="CUDA")
    for name, stages in _native.registrations().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")


def native() -> ModuleType:
    """Give the extension module.

    Raises:
      RuntimeError: it did not load.
    """
    if _native is None:
        raise RuntimeError(
            f"jaxcudnn: the extension jaxcudnn._native did not load from {Path(__file__).parent} "
            f"({_import_error}); run `pip install .` in a clone of jaxcudnn, and start Python in "
            f"another folder, since a clone's own has no extension"
        )
    return _native


def local_device() -> int | None:
    """Give CUDA's number of this process's first GPU, or None if JAX has none here."""
    try:
        return jax.local_devices(backend="cuda")[0].local_hardware_id
    except RuntimeError:  # JAX's way to say that it has no such backend
        return None


def cudnn() -> ModuleType:
    """Give the extension with cuDNN loaded: the copy that JAX has loaded, else the wheels'.

    Raises:
      RuntimeError: there is none, or it is too old, and the text names versions and paths; or this
        process was forked from one that had started CUDA.
    """
    extension = native()
    try:
        extension.check_not_forked()
    except extension.NativeError as error:
        raise RuntimeError(f"jaxcudnn: {error}") from error
    folders = _nvidia_folders()
    if not _is_loaded(_CUDNN):
        _load_what_cudnn_needs(folders)
    try:
        extension.load_cudnn([str(folder / "cudnn" / "lib" / _CUDNN) for folder in folders])
    except extension.NativeError as error:
        looked = ", ".join(map(str, folders)) or "no folder, since there are none"
        raise RuntimeError(
            f"jaxcudnn: {error}. NVIDIA's wheels were looked for in {looked}"
        ) from error
    return extension


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def _load_what_cudnn_needs(folders: list[Path]) -> None:
    """Load the libraries of one CUDA, and not of both, from the wheels if they are there."""
    for names in _NEEDED_BY_CUDNN:
        paths = [folder / name for folder in folders for name in names]
        found = [path for path in paths if path.exists()]
        for path in found:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        if found:
            return


def _nvidia_folders() -> list[Path]:
    """Give the folders into which NVIDIA's wheels unpack."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
