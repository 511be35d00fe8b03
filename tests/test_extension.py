# SPDX-License-Identifier: Apache-2.0
"""The extension as a binary: what it links, where it imports, and what it gives JAX."""

import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxcudnn import _load

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_NEEDED, DT_STRTAB, DT_RPATH, DT_RUNPATH = 0, 1, 5, 15, 29


def dynamic_strings(path, tags):
    """The texts of these tags in the dynamic section of a 64-bit ELF file (gabi, chapter 5)."""
    data = Path(path).read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    headers = []
    for start in range(table, table + size * count, size):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, start)
        headers.append((kind, offset, address, length))

    def file_offset(address):
        for kind, offset, start, length in headers:
            if kind == PT_LOAD and start <= address < start + length:
                return address - start + offset
        raise ValueError(f"no segment holds address {address}")

    ((_, start, _, length),) = (header for header in headers if header[0] == PT_DYNAMIC)
    entries = list(struct.iter_unpack("<QQ", data[start : start + length]))
    entries = entries[: [tag for tag, _ in entries].index(DT_NULL)]
    strings = file_offset(dict(entries)[DT_STRTAB])

    def text(value):
        return data[strings + value : data.index(b"\0", strings + value)].decode()

    return [text(value) for tag, value in entries if tag in tags]


@pytest.fixture(name="path")
def extension_path():
    path = _load.native().__file__
    assert path
    return path


class TestBinary:
    def test_needs_no_library_of_nvidias(self, path):
        needed = dynamic_strings(path, {DT_NEEDED})
        assert any(name.startswith("libc.so") for name in needed)  # so the file was read rightly
        system = (
            "libc.",
            "libm.",
            "libdl.",
            "libpthread.",
            "librt.",
            "libgcc_s.",
            "libstdc++.",
            "ld-linux",
        )
        assert [name for name in needed if not name.startswith(system)] == []

    def test_has_no_path_of_the_machine_that_built_it(self, path):
        assert dynamic_strings(path, {DT_RPATH, DT_RUNPATH}) == []

    def test_imports_alone_and_loads_nothing(self, path):
        script = textwrap.dedent(f"""
            import importlib.util
            spec = importlib.util.spec_from_file_location("jaxcudnn._native", {path!r})
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            print(module.ffi_api_version(), module.cache_info().size)
            mapped = open("/proc/self/maps").read()
            print([name for name in ("libcu", "libnv", "jaxlib") if "/" + name in mapped])
        """)
        # Without site-packages, so that no wheel can help.
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False
        )
        assert ran.stdout.splitlines() == ["(0, 3) 0", "[]"], ran.stderr


class TestInterface:
    def test_speaks_the_oldest_ffi_of_the_supported_jaxlibs(self):
        assert _load.native().ffi_api_version() == (0, 3)  # jaxlib 0.10's

    def test_versions_of_cudnn(self):
        native = _load.native()
        assert native.oldest_cudnn() == 90800
        assert native.cudnn_compiled_version() >= native.oldest_cudnn()

    def test_registers_one_target_with_its_stages(self):
        stages = {name: set(each) for name, each in _load.native().registrations().items()}
        assert stages == {_load.TARGET: {"instantiate", "initialize", "execute"}}
        (type_info,) = _load.native().types().values()
        assert set(type_info) == {"type_id", "type_info"}

    def test_cache_can_be_resized_and_emptied(self):
        native = _load.native()
        capacity = native.cache_info().capacity
        try:
            native.set_cache_capacity(7)
            assert native.cache_info().capacity == 7
        finally:
            native.set_cache_capacity(capacity)
        native.clear_cache()
        info = native.cache_info()
        assert (info.hits, info.misses, info.builds, info.evictions, info.size) == (0, 0, 0, 0, 0)
        assert info.seconds == 0

    def test_clock_is_off_and_empty_until_asked_for(self):
        native = _load.native()
        native.time_stages(True)
        native.time_stages(False)
        assert native.stage_samples() == {"initialize": [], "execute": [], "enqueue": []}
