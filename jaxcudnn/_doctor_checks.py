# SPDX-License-Identifier: Apache-2.0
"""What may be wrong with the installed packages, the extension, the GPUs and CUDA's libraries.

Each check is told what `_doctor_facts` found out, and so can be told anything. `versions` is of
the distributions that are installed, by name; `wanted` says whether JAX is to use CUDA.
"""

import platform
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from ._doctor_facts import PLUGINS, Cudnn, Driver, Gpus, Library, plugins, wants_cuda
from ._doctor_finding import Fault, Finding

LIBRARIES = {
    "libcublasLt": "cuDNN does not load without it",
    "libcudart": "jaxcudnn does not run on a GPU without it",
    "libnvrtc": "plans that cuDNN compiles at run time are not built without it",
}
"""Libraries of CUDA's that are opened by name, and who misses them."""

# The oldest drivers for each CUDA, by "CUDA Toolkit and Minimum Required Driver Version for CUDA
# Minor Version Compatibility" in https://docs.nvidia.com/cuda/cuda-toolkit-release-notes
_OLDEST_DRIVERS = {12: 525, 13: 580}

_ONE_CUDNN = (
    "unset LD_PRELOAD and LD_LIBRARY_PATH, and call jax.devices() before other packages with a "
    "cuDNN of their own are imported"
)

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def check_versions(versions: Mapping[str, str]) -> list[Finding]:
    """Report versions. JAX leaves a plugin alone that is not of jaxlib's version."""
    findings = [
        Finding("Python", f"{platform.python_version()} on {platform.platform()}"),
        Finding("jaxcudnn", versions.get("jaxcudnn", "imported from a folder, not installed")),
        *(Finding(name, versions.get(name, "not installed")) for name in ("jax", "jaxlib")),
    ]
    installed = plugins(versions)
    for plugin in installed:
        faults = []
        unequal = [
            f"{name} {versions.get(name, '(not installed)')}"
            for name in ("jaxlib", _pjrt(plugin))
            if _numbers(versions.get(name, "")) != _numbers(versions[plugin])
        ]
        if unequal:
            text = f"{versions[plugin]} does not go with {' and '.join(unequal)}: JAX wants equals"
            faults.append(Fault(text, install(versions)))
        if plugin != installed[0]:
            text = f"{installed[0]} is installed as well, and JAX uses only one"
            one, other = (
                f"`pip uninstall {name} {_pjrt(name)}`" for name in (plugin, *installed[:1])
            )
            faults.append(Fault(text, f"{one}, or {other}"))
        findings.append(Finding(plugin, versions[plugin], tuple(faults)))
    return findings if installed else [*findings, Finding("CUDA plugin", "none is installed")]


def check_extension(native: Callable[[], Any], jaxlib: tuple[int, int] | None) -> Finding:
    """Report the extension, and whether jaxlib can call it.

    Args:
      native: gives the extension, or raises RuntimeError.
      jaxlib: the version of XLA's FFI that jaxlib speaks, or None if it does not say.
    """
    try:
        extension = native()
    except RuntimeError as error:
        text, _, remedy = str(error).removeprefix("jaxcudnn: ").partition("; ")
        return Finding("extension", "not loaded", (Fault(text, remedy),))
    compiled = extension.ffi_api_version()
    found = f"{extension.__file__}, compiled for XLA's FFI {dotted(compiled)}"
    if jaxlib is None:
        return Finding("extension", found)
    found += f" (jaxlib's is {dotted(jaxlib)})"
    if compiled[0] == jaxlib[0] and compiled[1] <= jaxlib[1]:
        return Finding("extension", found)
    fault = Fault(
        f"it was compiled for XLA's FFI {dotted(compiled)}, and jaxlib cannot call it",
        "`pip install --upgrade jax jaxlib`, or build jaxcudnn anew, with `pip install .`, from a "
        "version that goes with this jaxlib",
    )
    return Finding("extension", found, (fault,))


def check_gpus(
    gpus: Gpus, driver: Driver, versions: Mapping[str, str], platforms: str | None
) -> list[Finding]:
    """Report each GPU, or why JAX has none although it should.

    Args:
      gpus: what JAX has.
      driver: what NVIDIA's driver sees.
      versions: of the installed packages.
      platforms: JAX's option `jax_platforms`.
    """
    if gpus.devices:
        return [_gpu(device, driver) for device in gpus.devices]
    if not wants_cuda(platforms):
        return [Finding("GPU", f"not looked for, since JAX's platforms are {platforms}")]
    if plugins(versions):
        fault = _no_gpu(driver, plugins(versions)[0], versions)
        if gpus.reason:
            fault = fault._replace(text=f"{fault.text}. JAX says: {gpus.reason}")
        return [Finding("GPU", "none", (fault,))]
    if not driver.memories:
        return [Finding("GPU", "none")]
    remedy = install(versions, 13 if driver.cuda >= 13000 else 12)
    fault = Fault(f"the driver sees {len(driver.memories)}, but JAX has no CUDA plugin", remedy)
    return [Finding("GPU", "none that JAX can use", (fault,))]


def _no_gpu(driver: Driver, plugin: str, versions: Mapping[str, str]) -> Fault:
    major = _major(plugin)
    oldest = _OLDEST_DRIVERS[major]
    if driver.error:
        return Fault(
            f"{plugin} is installed, but no NVIDIA driver ({driver.error})",
            f"install NVIDIA's driver, {oldest} or newer; start a container with `--gpus all`; or, "
            f"to do without a GPU, set JAX_PLATFORMS=cpu",
        )
    if driver.cuda < 1000 * major:
        remedy = f"update NVIDIA's driver to {oldest} or newer"
        if major == 13 and driver.cuda >= 12000:
            uninstall = f"`pip uninstall {plugin} {_pjrt(plugin)}`"
            remedy += f"; or take CUDA 12: {uninstall}, then {install(versions, 12)}"
        text = f"the driver is for CUDA {_cuda(driver.cuda)}, and {plugin} needs {major}.0"
        return Fault(text, remedy)
    if driver.status == _NO_DEVICE or (driver.status == 0 and not driver.memories):
        return Fault(
            "the driver sees none",
            "unset CUDA_VISIBLE_DEVICES, and see whether `nvidia-smi` lists the GPU",
        )
    if driver.status:
        return Fault(
            f"the driver does not start (CUDA error {driver.status})",
            "see what `nvidia-smi` says; if the driver was updated, restart the machine",
        )
    text = f"the driver sees {len(driver.memories)}, but {plugin} does not start"
    return Fault(text, install(versions))


def _gpu(device: Any, driver: Driver) -> Finding:
    number = device.local_hardware_id
    found = [device.device_kind, f"compute capability {device.compute_capability}"]
    if number < len(driver.memories):
        found.append(f"{driver.memories[number] / 2**30:.1f} GiB")
    release = f" {driver.release}" if driver.release else ""
    found.append(f"driver{release} for CUDA {_cuda(driver.cuda)}")
    return Finding(f"GPU {number}", ", ".join(found))


def check_cudnn(cudnn: Cudnn, versions: Mapping[str, str], *, wanted: bool) -> Finding:
    """Report cuDNN: whether there is one, new enough for this package and for JAX, and only one."""
    if cudnn.library is None:
        # One in the process is not replaced, whatever is installed.
        remedy = _ONE_CUDNN if cudnn.others else install(versions)
        return Finding("cuDNN", "none", (Fault(cudnn.error, remedy),) if wanted else ())
    found = (
        f"{dotted(cudnn.version)} at {cudnn.library.path}, {cudnn.library.how} (compiled with "
        f"{dotted(cudnn.compiled)}; {dotted(cudnn.oldest)} is the oldest that will do)"
    )
    faults = []
    if wanted and cudnn.version // 100 < cudnn.plugin // 100:  # JAX leaves the patch out as well
        text = f"JAX's plugin was compiled with {dotted(cudnn.plugin)} and refuses older ones"
        faults.append(Fault(text, install(versions)))
    if cudnn.others:
        faults.append(Fault(f"others are in the process: {', '.join(cudnn.others)}", _ONE_CUDNN))
    if cudnn.on_path:
        copies = ", ".join(cudnn.on_path)
        text = f"others are on LD_LIBRARY_PATH, and their parts may be mixed with it: {copies}"
        faults.append(Fault(text, "unset LD_LIBRARY_PATH, or take their folders off it"))
    return Finding("cuDNN", found, tuple(faults))


def check_library(
    name: str, library: Library | None, versions: Mapping[str, str], *, wanted: bool
) -> Finding:
    """Report one of `LIBRARIES`."""
    if library:
        return Finding(name, f"{library.path}, {library.how}")
    fault = Fault(f"it was not found, and {LIBRARIES[name]}", install(versions))
    return Finding(name, "none", (fault,) if wanted else ())


def majors(versions: Mapping[str, str]) -> list[int]:
    """Give the CUDA of JAX's plugins, or each that there may be one for."""
    return [_major(name) for name in plugins(versions) or PLUGINS]


def install(versions: Mapping[str, str], major: int | None = None) -> str:
    """Give the command that brings JAX's plugin, NVIDIA's libraries and the newest cuDNN."""
    major = major or majors(versions)[0]
    version = versions.get("jax", jax.__version__)
    return f'`pip install --upgrade "jax[cuda{major}]=={version}" nvidia-cudnn-cu{major}`'


def dotted(version: int | Iterable[int]) -> str:
    """Give '9.19.0' for 91900, and '0.3' for (0, 3)."""
    if isinstance(version, int):
        version = (version // 10000, version // 100 % 100, version % 100)
    return ".".join(map(str, version))


def _major(plugin: str) -> int:
    return int(plugin.removeprefix("jax-cuda").partition("-")[0])


def _pjrt(plugin: str) -> str:
    return plugin.replace("plugin", "pjrt")


def _numbers(version: str) -> str:
    """Give what JAX compares of a version: the numbers at its beginning."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return found.group() if found else ""


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
