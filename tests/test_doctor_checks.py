# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of packages, the extension, GPUs and libraries, told by stand-ins.

What is written here in full is what a user reads.
"""

import ctypes
import logging
import os
import sys
from importlib import metadata
from types import SimpleNamespace

import jax
import pytest

from installations import (
    CPU_VERSIONS,
    CUDA12,
    FOUND,
    H200,
    INSTALL,
    INSTALL12,
    VERSIONS,
    WHEEL,
    faults,
)
from jaxcudnn import _doctor_checks, _doctor_facts, _load
from jaxcudnn._doctor_facts import Cudnn, Driver, Gpus, Library
from jaxcudnn._doctor_finding import Fault, Finding
from test_load import library


class TestVersions:
    def test_that_go_together(self):
        findings = _doctor_checks.check_versions(VERSIONS)
        assert faults(*findings) == []
        found = {finding.what: finding.found for finding in findings}
        assert found.pop("Python").startswith(".".join(map(str, sys.version_info[:3])) + " on ")
        assert found == {n: v for n, v in VERSIONS.items() if not n.endswith("pjrt")}

    @pytest.mark.parametrize("version", ["0.11.2+cuda13", "0.11.2.dev20261130", "0.11.2rc1"])
    def test_suffixes_do_not_matter(self, version):
        versions = VERSIONS | {"jax-cuda13-plugin": version.replace(".dev", "dev")}
        assert faults(*_doctor_checks.check_versions(versions)) == []

    @pytest.mark.parametrize(
        ("changes", "unequal"),
        [
            ({"jaxlib": "0.11.1"}, "jaxlib 0.11.1"),
            ({"jax-cuda13-pjrt": "0.11.10"}, "jax-cuda13-pjrt 0.11.10"),
            ({"jaxlib": "0.12", "jax-cuda13-pjrt": "1"}, "jaxlib 0.12 and jax-cuda13-pjrt 1"),
        ],
    )
    def test_a_plugin_that_does_not_match(self, changes, unequal):
        findings = _doctor_checks.check_versions(VERSIONS | changes)
        text = f"0.11.2 does not go with {unequal}: JAX wants equals"
        assert faults(*findings) == [Fault(text, INSTALL)]

    def test_a_plugin_without_its_other_half(self):
        versions = {n: v for n, v in VERSIONS.items() if n != "jax-cuda13-pjrt"}
        (fault,) = faults(*_doctor_checks.check_versions(versions))
        assert "does not go with jax-cuda13-pjrt (not installed)" in fault.text

    def test_two_plugins(self):
        (fault,) = faults(*_doctor_checks.check_versions(VERSIONS | CUDA12))
        assert fault == Fault(
            "jax-cuda13-plugin is installed as well, and JAX uses only one",
            "`pip uninstall jax-cuda12-plugin jax-cuda12-pjrt`, or "
            "`pip uninstall jax-cuda13-plugin jax-cuda13-pjrt`",
        )

    def test_no_plugin(self):
        assert _doctor_checks.check_versions({})[1:] == [
            Finding("jaxcudnn", "imported from a folder, not installed"),
            Finding("jax", "not installed"),
            Finding("jaxlib", "not installed"),
            Finding("CUDA plugin", "none is installed"),
        ]

    def test_are_those_of_the_distributions(self, monkeypatch):
        def version(name):
            if name == "jax-cuda12-pjrt":
                return "9"
            raise metadata.PackageNotFoundError(name)

        assert _doctor_facts.versions()["jax"] == jax.__version__
        monkeypatch.setattr(metadata, "version", version)
        assert _doctor_facts.versions() == {"jax-cuda12-pjrt": "9"}


class TestExtension:
    EXTENSION = SimpleNamespace(__file__="/a/_native.so", ffi_api_version=lambda: (0, 3))

    def check(self, jaxlib):
        return _doctor_checks.check_extension(lambda: self.EXTENSION, jaxlib)

    @pytest.mark.parametrize("jaxlib", [(0, 3), (0, 5)])
    def test_that_jaxlib_can_call(self, jaxlib):
        found = "/a/_native.so, compiled for XLA's FFI 0.3"
        assert self.check(jaxlib) == Finding("extension", f"{found} (jaxlib's is 0.{jaxlib[1]})")
        assert self.check(None) == Finding("extension", found)

    @pytest.mark.parametrize("jaxlib", [(0, 2), (1, 3)])
    def test_that_it_cannot(self, jaxlib):
        assert self.check(jaxlib).faults == (
            Fault(
                "it was compiled for XLA's FFI 0.3, and jaxlib cannot call it",
                "`pip install --upgrade jax jaxlib`, or build jaxcudnn anew, with `pip install .`, "
                "from a version that goes with this jaxlib",
            ),
        )

    def test_missing(self, monkeypatch):
        monkeypatch.setattr(_load, "_native", None)
        monkeypatch.setattr(_load, "_import_error", ImportError("no such thing"), raising=False)
        finding = _doctor_checks.check_extension(_load.native, None)
        assert finding.found == "not loaded"
        (fault,) = finding.faults
        assert fault.text.startswith("the extension jaxcudnn._native did not load from ")
        assert fault.text.endswith(" (no such thing)")
        assert fault.remedy.startswith("run `pip install .` in a clone of jaxcudnn, and start")

    def test_the_ffi_of_jaxlib_is_in_its_header(self, tmp_path):
        found = _doctor_facts.ffi_of_jaxlib()
        assert found and found >= (0, 3)
        assert _doctor_facts.ffi_of_jaxlib(str(tmp_path)) is None
        header = tmp_path / "xla/ffi/api/c_api.h"
        header.parent.mkdir(parents=True)
        header.write_text("#define XLA_FFI_API_MAJOR 2\n#define XLA_FFI_API_MINOR 17\n")
        assert _doctor_facts.ffi_of_jaxlib(str(tmp_path)) == (2, 17)
        header.write_text("#define XLA_FFI_API_MAJOR 2\n")
        assert _doctor_facts.ffi_of_jaxlib(str(tmp_path)) is None


DRIVER = Driver(cuda=13000, memories=(139 << 30,), release="580.159")


class TestGpus:
    def check(self, driver=DRIVER, *, reason="", versions=VERSIONS, platforms=None, devices=()):
        return _doctor_checks.check_gpus(Gpus(devices, reason), driver, versions, platforms)

    def test_all_are_named(self):
        other = SimpleNamespace(
            local_hardware_id=1, device_kind="NVIDIA L4", compute_capability="8.9"
        )
        said = "compute capability {}{}, driver 580.159 for CUDA 13.0"
        assert self.check(devices=(H200, other)) == [
            Finding("GPU 0", "NVIDIA H200, " + said.format("9.0", ", 139.0 GiB")),
            Finding("GPU 1", "NVIDIA L4, " + said.format("8.9", "")),
        ]
        unnamed = Driver(cuda=12090)
        (finding,) = self.check(unnamed, devices=(H200,))
        assert finding.found == "NVIDIA H200, compute capability 9.0, driver for CUDA 12.9"

    @pytest.mark.parametrize("platforms", ["cpu", "rocm,cpu"])
    def test_not_wanted(self, platforms):
        found = f"not looked for, since JAX's platforms are {platforms}"
        assert self.check(Driver("none"), platforms=platforms) == [Finding("GPU", found)]

    @pytest.mark.parametrize("platforms", ["", "cuda", "cpu,gpu"])
    def test_no_driver(self, platforms):
        (finding,) = self.check(Driver("libcuda.so.1: not there"), platforms=platforms)
        assert finding == Finding(
            "GPU",
            "none",
            (
                Fault(
                    "jax-cuda13-plugin is installed, but no NVIDIA driver (libcuda.so.1: not "
                    "there)",
                    "install NVIDIA's driver, 580 or newer; start a container with `--gpus all`; "
                    "or, to do without a GPU, set JAX_PLATFORMS=cpu",
                ),
            ),
        )

    def test_an_old_driver(self):
        (fault,) = faults(*self.check(Driver(cuda=12080, status=0)))
        assert fault == Fault(
            "the driver is for CUDA 12.8, and jax-cuda13-plugin needs 13.0",
            "update NVIDIA's driver to 580 or newer; or take CUDA 12: `pip uninstall "
            f"jax-cuda13-plugin jax-cuda13-pjrt`, then {INSTALL12}",
        )

    @pytest.mark.parametrize(("versions", "oldest"), [(VERSIONS, 580), (CUDA12, 525)])
    def test_a_driver_too_old_for_either(self, versions, oldest):
        (fault,) = faults(*self.check(Driver(cuda=11080), versions=versions))
        assert fault.remedy == f"update NVIDIA's driver to {oldest} or newer"

    @pytest.mark.parametrize("status", [0, 100])
    def test_a_driver_that_sees_none(self, status):
        (fault,) = faults(*self.check(Driver(cuda=13000, status=status)))
        assert fault == Fault(
            "the driver sees none",
            "unset CUDA_VISIBLE_DEVICES, and see whether `nvidia-smi` lists the GPU",
        )

    def test_a_driver_that_does_not_start(self):
        (fault,) = faults(*self.check(Driver(cuda=13000, status=803)))
        assert fault == Fault(
            "the driver does not start (CUDA error 803)",
            "see what `nvidia-smi` says; if the driver was updated, restart the machine",
        )

    def test_a_plugin_that_does_not_start(self):
        (fault,) = faults(*self.check(reason="Unable to load cuFFT."))
        assert fault == Fault(
            "the driver sees 1, but jax-cuda13-plugin does not start. JAX says: Unable to load "
            "cuFFT.",
            INSTALL,
        )

    def test_no_plugin(self):
        assert self.check(Driver("none"), versions=CPU_VERSIONS) == [Finding("GPU", "none")]
        for cuda, remedy in ((13010, INSTALL), (12090, INSTALL12)):
            driver = Driver(cuda=cuda, memories=(1, 1))
            (finding,) = self.check(driver, versions=CPU_VERSIONS)
            assert finding.found == "none that JAX can use"
            text = "the driver sees 2, but JAX has no CUDA plugin"
            assert finding.faults == (Fault(text, remedy),)

    def test_what_jax_says(self, monkeypatch):
        logger = logging.getLogger("jax")
        before = logger.handlers, logger.propagate

        def devices(backend):
            assert backend == "cuda"
            try:
                raise ValueError("Unable to load cuFFT.\n\nIs it installed?")
            except ValueError:
                logging.getLogger("jax.inside").exception("plugin configuration error")
            logging.getLogger("jax.inside").error("something else")
            raise RuntimeError("Unknown backend cuda.\nMore")

        monkeypatch.setattr(jax, "local_devices", devices)
        reason = "Unable to load cuFFT. Is it installed?"
        assert _doctor_facts.start_jax() == Gpus((), reason)
        monkeypatch.setattr(logging.getLogger("jax.inside"), "disabled", True)
        assert _doctor_facts.start_jax() == Gpus((), "Unknown backend cuda.")
        monkeypatch.setattr(jax, "local_devices", lambda backend: [H200])
        assert _doctor_facts.start_jax() == Gpus((H200,))
        assert (logger.handlers, logger.propagate) == before

    def test_compute_capability_as_a_number(self):
        assert _doctor_facts.compute_capability(Gpus(())) == 0
        assert _doctor_facts.compute_capability(Gpus((H200,))) == 90
        other = SimpleNamespace(compute_capability="12.1")
        assert _doctor_facts.compute_capability(Gpus((other,))) == 121


DRIVER_SOURCE = """
int cuDriverGetVersion(int* version) { *version = 13010; return 0; }
int cuInit(unsigned flags) { return flags ? 1 : STATUS; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int number) { *device = number + 10; return 0; }
int cuDeviceTotalMem_v2(unsigned long* bytes, int device) { *bytes = device; return 0; }
"""


class TestDriver:
    def test_missing(self):
        driver = _doctor_facts.driver("libno_driver.so.1")
        assert driver.error.startswith("libno_driver.so.1: cannot open")
        assert (driver.cuda, driver.memories) == (0, ())

    @pytest.mark.parametrize(("status", "memories"), [(0, (10, 11)), (100, ())])
    def test_that_answers(self, tmp_path, status, memories):
        path = tmp_path / f"libcuda{status}.so"
        library(path, DRIVER_SOURCE.replace("STATUS", str(status)))
        driver = _doctor_facts.driver(str(path))
        assert (driver.error, driver.cuda, driver.status) == ("", 13010, status)
        assert driver.memories == memories


ONE = (
    "unset LD_PRELOAD and LD_LIBRARY_PATH, and call jax.devices() before other packages with a "
    "cuDNN of their own are imported"
)


class TestCudnn:
    def check(self, wanted=True, **changes):
        cudnn = Cudnn(**{**vars(FOUND), **changes})
        return _doctor_checks.check_cudnn(cudnn, VERSIONS, wanted=wanted)

    def test_one(self):
        assert self.check() == Finding(
            "cuDNN",
            "9.19.0 at /wheels/libcudnn.so.9, from NVIDIA's wheels (compiled with 9.27.0; 9.8.0 is "
            "the oldest that will do)",
        )

    def test_none(self):
        changes = {"library": None, "error": "cuDNN 9.1.0 is too old"}
        assert self.check(wanted=False, **changes) == Finding("cuDNN", "none")
        fault = Fault("cuDNN 9.1.0 is too old", INSTALL)
        assert self.check(**changes) == Finding("cuDNN", "none", (fault,))
        (fault,) = self.check(**changes, others=("/a/libcudnn.so.9",)).faults
        assert fault == Fault("cuDNN 9.1.0 is too old", ONE)

    def test_older_than_jax_takes(self):
        text = "JAX's plugin was compiled with 9.20.0 and refuses older ones"
        assert self.check(plugin=92000).faults == (Fault(text, INSTALL),)
        assert self.check(plugin=91905).faults == ()  # JAX looks at no patch release
        assert self.check(plugin=92000, wanted=False).faults == ()

    def test_two_in_the_process(self):
        (fault,) = self.check(others=("/a/libcudnn.so.9", "/b/libcudnn.so.9")).faults
        assert fault == Fault(
            "others are in the process: /a/libcudnn.so.9, /b/libcudnn.so.9",
            ONE,
        )

    def test_another_on_the_path(self):
        finding = self.check(on_path=("/a/libcudnn.so.9",), others=("/b/libcudnn.so.9",))
        assert finding.faults[1] == Fault(
            "others are on LD_LIBRARY_PATH, and their parts may be mixed with it: /a/libcudnn.so.9",
            "unset LD_LIBRARY_PATH, or take their folders off it",
        )

    def test_is_the_one_that_convolutions_use(self, monkeypatch, tmp_path):
        used, other = (tmp_path / name / "libcudnn.so.9" for name in ("used", "other"))
        for file in (used, other):
            file.parent.mkdir()
            file.touch()
        (tmp_path / "link").symlink_to(used.parent)
        native = SimpleNamespace(
            oldest_cudnn=lambda: 90800,
            cudnn_compiled_version=lambda: 92700,
            cudnn_version=lambda: 91900,
            cudnn_path=lambda: str(used),
        )
        plugin = SimpleNamespace(cudnn_build_version=lambda: 91200)
        monkeypatch.setitem(sys.modules, "jax_cuda13_plugin", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "jax_cuda13_plugin._versions", plugin)
        path = os.pathsep.join(str(tmp_path / name) for name in ("link", "other", "empty"))
        monkeypatch.setenv("LD_LIBRARY_PATH", path + os.pathsep)
        monkeypatch.setattr(_load, "cudnn", lambda: native)
        monkeypatch.setattr(_doctor_facts, "mapped", lambda name: [str(used), str(other)])
        assert _doctor_facts.cudnn(native, [str(used)], ["jax-cuda13-plugin"]) == Cudnn(
            Library(str(used), "in the process already"),
            version=91900,
            oldest=90800,
            compiled=92700,
            plugin=91200,
            others=(str(other),),
            on_path=(str(other),),
        )

        def refuse():
            raise RuntimeError("jaxcudnn: cuDNN 9.1.0 is too old")

        monkeypatch.setattr(_load, "cudnn", refuse)
        monkeypatch.setattr(_load, "_nvidia_folders", lambda: [tmp_path / "link"])
        for plugins in ([], ["jax-cuda0-plugin"]):  # none, and one that cannot be imported
            assert _doctor_facts.cudnn(native, [], plugins) == Cudnn(
                None,
                error="cuDNN 9.1.0 is too old",
                oldest=90800,
                compiled=92700,
                others=(str(other),),
            )


class TestLibraries:
    @pytest.mark.parametrize(
        ("name", "needed_for"),
        [
            ("libcublasLt", "cuDNN does not load without it"),
            ("libcudart", "jaxcudnn does not run on a GPU without it"),
            ("libnvrtc", "plans that cuDNN compiles at run time are not built without it"),
        ],
    )
    def test_missing(self, name, needed_for):
        check = _doctor_checks.check_library
        fault = Fault(f"it was not found, and {needed_for}", INSTALL)
        assert check(name, None, VERSIONS, wanted=True) == Finding(name, "none", (fault,))
        assert check(name, None, VERSIONS, wanted=False) == Finding(name, "none")
        assert name in _doctor_checks.LIBRARIES

    def test_found(self):
        finding = _doctor_checks.check_library("libnvrtc", WHEEL, VERSIONS, wanted=True)
        assert finding == Finding("libnvrtc", "/wheels/libcudnn.so.9, from NVIDIA's wheels")

    def test_are_those_of_the_plugin(self):
        assert _doctor_checks.majors(VERSIONS) == [13]
        assert _doctor_checks.majors(CUDA12) == [12]
        assert _doctor_checks.majors(CPU_VERSIONS) == [13, 12]

    def test_how_they_came_here(self, tmp_path, monkeypatch):
        path = tmp_path / "libdoctors_test.so.7"
        library(path, "unsigned long cublasLtGetVersion(void) { return 4300000001; }")
        ctypes.CDLL(str(path))
        names = ["libdoctors_test.so.8", path.name]
        found = Library(str(path), "found by the linker")
        assert _doctor_facts.library(names, []) == found
        assert _doctor_facts.library(names[:1], []) is None
        monkeypatch.setattr(_load, "_nvidia_folders", lambda: [tmp_path / "x", tmp_path])
        assert _doctor_facts.library(names, []) == Library(str(path), "from NVIDIA's wheels")
        before = _doctor_facts.library(names, [str(path)])
        assert before == Library(str(path), "in the process already")
        assert _doctor_facts.cublaslt_version(found) == 4300000001
        assert _doctor_facts.cublaslt_version(None) == 0

    def test_in_the_process(self, tmp_path):
        maps = tmp_path / "maps"
        row = "7f00-7f01 r--p 0000 00:01 9    "
        names = ["/a b/libx.so.9", "/a b/libx.so.9", "/c/libx.so.9.1", "/c/libx.so.91", "[heap]"]
        maps.write_text("".join(f"{row}{name}\n" for name in names) + row.strip() + "\n")
        assert _doctor_facts.mapped("libx.so.9", str(maps)) == ["/a b/libx.so.9", "/c/libx.so.9.1"]
        assert _doctor_facts.mapped(maps=str(maps)) == list(dict.fromkeys(names[:4]))
