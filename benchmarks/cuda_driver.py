# SPDX-License-Identifier: Apache-2.0
"""CUDA's driver and NVRTC through ctypes, as much as the depthwise kernels need."""

import ctypes
import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from pathlib import Path
from typing import Any

import numpy as np

MULTIPROCESSORS, SHARED_BYTES, CARVEOUT = 16, 8, 9  # of the driver's enumerations

RATES = """
extern "C" __global__ void __launch_bounds__(256) Fma(float* out, float a) {
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = threadIdx.x + i;
  const float b = a + threadIdx.x;
#pragma unroll 1
  for (int k = 0; k < 4096; ++k) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = x[i] * a + b;
  }
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += x[i];
  if (sum == 1.2345f) *out = sum;
}
extern "C" __global__ void Wait(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
"""
FMA_FLOPS_PER_THREAD = 2 * 16 * 4096


def compile_source(
    source: str, options: Sequence[str], headers: Mapping[str, str] | None = None
) -> bytes:
    """Compile by NVRTC, of the `nvidia` packages or of the system; needs no GPU.

    Raises:
        RuntimeError: there is no NVRTC, or the source is wrong.
    """
    nvrtc = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    headers = headers or {}
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCreateProgram(
        byref(program), source.encode(), None, len(headers), texts, names
    )
    _require(status, "nvrtcCreateProgram")
    if nvrtc.nvrtcCompileProgram(program, len(options), given):
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode())
    _require(nvrtc.nvrtcGetCUBINSize(program, byref(size)), "nvrtcGetCUBINSize")
    cubin = ctypes.create_string_buffer(size.value)
    _require(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    nvrtc.nvrtcDestroyProgram(byref(program))
    return cubin.raw


class Driver:
    """The first GPU, on the default stream."""

    def __init__(self) -> None:
        """Start CUDA.

        Raises:
            OSError: there is no driver.
            RuntimeError: there is no GPU.
        """
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self._call("cuDeviceGet", byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuDeviceGetAttribute", byref(count), MULTIPROCESSORS, device)
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, 256, device)
        self.multiprocessors, self.name = count.value, name.value.decode()
        cubin = compile_source(RATES, ["--gpu-architecture=sm_90"])
        self._wait, self._fma = self.function(cubin, "Wait", 0), self.function(cubin, "Fma", 0)

    def function(self, cubin: bytes, name: str, shared: int) -> ctypes.c_void_p:
        """Load a kernel that is launched with so many bytes of shared memory."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", byref(module), cubin)
        self._call("cuModuleGetFunction", byref(function), module, name.encode())
        self._call("cuFuncSetAttribute", function, SHARED_BYTES, shared)
        if shared:
            self._call("cuFuncSetAttribute", function, CARVEOUT, 100)
        return function

    def resident(self, function: ctypes.c_void_p, threads: int, shared: int) -> int:
        """Give how many blocks a multiprocessor holds."""
        count = ctypes.c_int()
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self._call(name, byref(count), function, threads, ctypes.c_size_t(shared))
        return count.value

    def launch(
        self, function: ctypes.c_void_p, blocks: int, threads: int, shared: int, *arguments: Any
    ) -> None:
        """Launch with arguments that are ctypes objects."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        grid = (blocks, 1, 1, threads, 1, 1)
        self._call("cuLaunchKernel", function, *grid, shared, None, pointers, None)

    def allocate(self, size: int, fill: int = 0xFF) -> ctypes.c_uint64:
        """Give the address of so many bytes of one value, all ones by default, which is NaN."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", byref(address), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(fill), ctypes.c_size_t(size))
        return address

    def free(self, *addresses: ctypes.c_uint64) -> None:
        """Free memory once the GPU has come to rest."""
        self.synchronize()
        for address in addresses:
            self._call("cuMemFree_v2", address)

    def upload(self, array: Any) -> ctypes.c_uint64:
        """Copy an array to new memory of the GPU."""
        array = np.ascontiguousarray(array)
        address = self.allocate(array.nbytes)
        data = ctypes.c_void_p(array.ctypes.data)
        self._call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(array.nbytes))
        return address

    def download(self, address: ctypes.c_uint64, array: Any) -> None:
        """Copy to a contiguous array, after all that was launched."""
        data = ctypes.c_void_p(array.ctypes.data)
        self._call("cuMemcpyDtoH_v2", data, address, ctypes.c_size_t(array.nbytes))

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self._call("cuCtxSynchronize")

    def microseconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Time each of some calls on the GPU; the host gets ahead, lest its own pace is timed."""
        events = [ctypes.c_void_p() for _ in range(len(calls) + 1)]
        for event in events:
            self._call("cuEventCreate", byref(event), 0)
        self.launch(self._wait, 1, 1, 0, ctypes.c_longlong(10_000_000))
        self._call("cuEventRecord", events[0], None)
        for call, event in zip(calls, events[1:], strict=True):
            call()
            self._call("cuEventRecord", event, None)
        self.synchronize()
        times, one = [], ctypes.c_float()
        for before, after in zip(events, events[1:], strict=False):
            self._call("cuEventElapsedTime", byref(one), before, after)
            times.append(1000 * one.value)
        for event in events:
            self._call("cuEventDestroy_v2", event)
        return times

    def rates(self) -> tuple[float, float]:
        """Measure bytes a second, read and written, and float32 operations a second."""
        size = 1 << 30
        x, y = self.allocate(size), self.allocate(size)

        def copy() -> None:
            self._call("cuMemcpyDtoDAsync_v2", y, x, ctypes.c_size_t(size), None)

        blocks, factor = 32 * self.multiprocessors, ctypes.c_float(0.5)
        copied = statistics.median(self.microseconds([copy] * 9))
        multiply = [lambda: self.launch(self._fma, blocks, 256, 0, y, factor)] * 7
        multiplied = statistics.median(self.microseconds(multiply))
        self.free(x, y)
        return 2e6 * size / copied, 1e6 * FMA_FLOPS_PER_THREAD * 256 * blocks / multiplied

    def _call(self, name: str, *arguments: Any) -> None:
        _require(getattr(self._cuda, name)(*arguments), name)


def _require(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} returned {status}")


def _nvrtc() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    found = [str(p) for place in places for p in sorted(place.glob("*/lib/libnvrtc.so.*[0-9]"))]
    for path in (*reversed(found), "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        # Which it opens by name.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
        return library
    raise RuntimeError("there is no libnvrtc.so of CUDA 12 or 13; pip install nvidia-cuda-nvrtc")
