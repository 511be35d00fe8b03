# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxcudnn doctor`: each fault with its remedy, told by stand-ins, and the whole of it.

What is written here in full is what a user reads.
"""

import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxcudnn
from jaxcudnn import (
    __main__,
    _command_doctor,
    _doctor,
    _doctor_checks,
    _doctor_facts,
    _doctor_settings,
    _load,
    _options,
    _self_test,
)
from jaxcudnn._doctor_facts import Cudnn, Driver, Gpus, Library
from jaxcudnn._doctor_finding import Fault, Finding
from processes import run_python
from test_load import library

VERSIONS = {
    "jaxcudnn": "0.1.0",
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "jax-cuda13-plugin": "0.11.2",
    "jax-cuda13-pjrt": "0.11.2",
}
CPU_VERSIONS = {name: VERSIONS[name] for name in ("jaxcudnn", "jax", "jaxlib")}
CUDA12 = {name.replace("13", "12"): version for name, version in VERSIONS.items()}
INSTALL = '`pip install --upgrade "jax[cuda13]==0.11.2" nvidia-cudnn-cu13`'
INSTALL12 = INSTALL.replace("13", "12")


def faults(*findings):
    return [fault for finding in findings for fault in finding.faults]


class TestCommand:
    def test_says_what_is_found_and_no_fault(self):
        lines = run_python(
            "from jaxcudnn.__main__ import main; raise SystemExit(main(['doctor']))",
            JAX_PLATFORMS="cpu",
            JAXCUDNN_STORE="off",
            LD_LIBRARY_PATH="",
        )
        assert lines[-2:] == ["", "No fault was found."]
        found = [line.split(": ", 1) for line in lines[:-2]]
        names = [name for name, _ in found]
        assert names[:4] == ["Python", "jaxcudnn", "jax", "jaxlib"]
        assert len({len(name) + len(text) - len(text.lstrip()) for name, text in found}) == 1
        texts = {name: text.strip() for name, text in found}
        assert texts["GPU"] == "not looked for, since JAX's platforms are cpu"
        assert texts["JAX_PLATFORMS"] == "cpu"
        assert texts["self-test"] == "passed: forward and both gradients, by XLA on the CPU"
        assert {"extension", "cuDNN", "libcublasLt", "libcudart", "libnvrtc", "option"} <= {*names}
        assert names[-1] == "self-test"

    def test_faults_give_the_status_and_are_sorted_by_remedy(self, monkeypatch, capsys):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
        findings = [
            Finding("a", "1", (Fault("it is one", "make it two"),)),
            Finding("long name", "2", (Fault("it is two", "restart"), Fault("odd", "make it two"))),
        ]
        monkeypatch.setattr(_doctor, "examine", lambda: findings)
        assert __main__.main(["doctor"]) == 1
        assert capsys.readouterr().out.splitlines() == [
            "a:         1",
            "long name: 2",
            "",
            "FAULT   a: it is one",
            "FAULT   long name: odd",
            "REMEDY  make it two",
            "",
            "FAULT   long name: it is two",
            "REMEDY  restart",
        ]
        assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"  # as the user has it

    def test_leaves_the_memory_of_the_gpu_to_others(self, monkeypatch, capsys):
        monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
        seen = []

        def examine():
            seen.append(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
            return [Finding("a", "1")]

        monkeypatch.setattr(_doctor, "examine", examine)
        assert __main__.main(["doctor"]) == 0
        assert seen == ["false"]
        assert capsys.readouterr().out == "a: 1\n\nNo fault was found.\n"

    def test_in_a_clone_without_its_extension(self, tmp_path):
        package = Path(jaxcudnn.__file__).parent
        clone = shutil.copytree(
            package, tmp_path / "jaxcudnn", ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
        ran = subprocess.run(
            [sys.executable, "-m", "jaxcudnn", "doctor"],
            cwd=tmp_path,
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "JAXCUDNN_STORE": "off", "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 1, ran.stderr
        lines = ran.stdout.splitlines()
        (fault,) = [line for line in lines if line.startswith("FAULT ")]
        assert fault.startswith(
            f"FAULT   extension: the extension jaxcudnn._native did not load from {clone} ("
        )
        assert lines[lines.index(fault) + 1] == (
            "REMEDY  run `pip install .` in a clone of jaxcudnn, and start Python in another "
            "folder, since a clone's own has no extension"
        )
        assert any(line.startswith("self-test:") and "passed" in line for line in lines)

    def test_unknown_and_missing_commands(self, capsys):
        for argv in (["nurse"], []):
            with pytest.raises(SystemExit, match="2"):
                __main__.main(argv)
        assert "invalid choice: 'nurse'" in capsys.readouterr().err


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


H200 = SimpleNamespace(local_hardware_id=0, device_kind="NVIDIA H200", compute_capability="9.0")
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


WHEEL = Library("/wheels/libcudnn.so.9", "from NVIDIA's wheels")
ONE = (
    "unset LD_PRELOAD and LD_LIBRARY_PATH, and call jax.devices() before other packages with a "
    "cuDNN of their own are imported"
)
FOUND = Cudnn(WHEEL, version=91900, oldest=90800, compiled=92700, plugin=91200)


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


class TestVariables:
    def check(self, **environ):
        return _doctor_settings.check_variables(environ)

    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("JAXCUDNN_ALGORITM", "JAXCUDNN_ALGORITHM"),
            ("JAXCUDNN_ALLOW_TF_32", "JAXCUDNN_ALLOW_TF32"),
            ("JAXCUDNN_STORAGE", "JAXCUDNN_STORE"),
        ],
    )
    def test_nearly_right(self, name, near):
        fault = Fault("jaxcudnn reads no variable of this name", f"write {near}")
        assert self.check(**{name: "1", near: "2"}) == [Finding(name, "1", (fault,))]

    def test_unlike_any(self):
        (fault,) = faults(*self.check(JAXCUDNN_Q="1"))
        assert fault.remedy.startswith("unset it; there are JAXCUDNN_ALGORITHM, JAXCUDNN_WORK")
        assert "JAXCUDNN_STORE" in fault.remedy

    def test_every_one_that_is_read_is_known(self):
        read = {f"JAXCUDNN_{name.upper()}" for name in _options.Options.__dataclass_fields__}
        for path in Path(__file__).parent.glob("*.py"):
            read |= {*re.findall(r'environ(?:\.get\(|\[)"(JAXCUDNN_\w+)"', path.read_text())}
        assert "JAXCUDNN_REQUIRE_GPU" in read
        assert faults(*self.check(**dict.fromkeys(read, "1"))) == []

    def test_of_others(self):
        environ = {
            "PATH": "/bin",
            "NVIDIA_TF32_OVERRIDE": "0",
            "CUDA_VISIBLE_DEVICES": "1",
            "XLA_FLAGS": "--xla_dump_to=/x --xla_gpu_deterministic_ops=true --xla_gpu_graph_x=1",
        }
        assert self.check(**environ) == [
            Finding("CUDA_VISIBLE_DEVICES", "1"),
            Finding("NVIDIA_TF32_OVERRIDE", "0"),
            Finding("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_graph_x=1"),
        ]
        assert self.check(XLA_FLAGS="--xla_dump_to=/x") == []


class TestOptions:
    def check(self, options=None, **environ):
        options = options or _options.Options()
        return _doctor_settings.check_options(lambda: options, environ)

    def test_where_they_come_from(self):
        options = _options.Options(algorithm="heuristic")
        found = [f.found for f in self.check(options, JAXCUDNN_ALGORITHM="heuristic")]
        assert found[0] == "algorithm = 'heuristic', by JAXCUDNN_ALGORITHM"
        assert found[1] == "workspace_limit = 1073741824, the default"
        assert len(found) == len(_options.Options.__dataclass_fields__)

    def test_that_xla_turns_on(self, monkeypatch):
        assert "deterministic = False, the default" in [f.found for f in self.check()]
        monkeypatch.setattr(_doctor_settings, "xla_is_deterministic", lambda: True)
        found = [f.found for f in self.check()]
        assert "deterministic = False, the default, but XLA_FLAGS turns it on" in found
        assert sum("XLA_FLAGS" in text for text in found) == 1

    def test_that_cannot_be_read(self, monkeypatch):
        monkeypatch.setenv("JAXCUDNN_VERIFY", "maybe")
        read = _options.from_environment.__wrapped__
        (finding,) = _doctor_settings.check_options(read, os.environ)
        assert finding.found == "JAXCUDNN_VERIFY=maybe"
        (fault,) = finding.faults
        assert "JAXCUDNN_VERIFY must be 1 or 0, got 'maybe'" in fault.text
        assert fault.remedy == "correct the variable, or unset it"


class TestStore:
    REMEDY = "set JAXCUDNN_STORE to a file that can be read and written, or to 'off'"

    def check(self, path, info=lambda: SimpleNamespace(entries=3, bytes=8192)):
        return _doctor_settings.check_store(lambda: path, info)

    def test_is_shown(self, tmp_path):
        path = tmp_path / "not yet there" / "choices"
        assert self.check(path) == Finding("store", f"{path}, 3 choices in 8192 bytes")
        assert self.check(None) == Finding("store", "off, by JAXCUDNN_STORE")

    def test_that_cannot_be_read(self, tmp_path):
        def info():
            raise OSError("no access")

        path = tmp_path / "choices"
        fault = Fault("no access", self.REMEDY)
        assert self.check(path, info) == Finding("store", str(path), (fault,))

    def test_that_cannot_be_written(self, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
        text = f"{tmp_path} cannot be written, so that every process measures anew"
        assert self.check(tmp_path / "a" / "b").faults == (Fault(text, self.REMEDY),)
        assert asked == [(tmp_path, os.W_OK)]

    def test_is_the_packages(self, monkeypatch, tmp_path):
        info = SimpleNamespace(entries=1, bytes=2)
        store = SimpleNamespace(path=lambda: tmp_path, info=lambda: info)
        monkeypatch.setitem(sys.modules, "jaxcudnn.store", store)
        monkeypatch.setattr(_doctor, "check_self_test", lambda *_: Finding("self-test", ""))
        expected = Finding("store", f"{tmp_path}, 1 choices in 2 bytes")
        assert expected in _doctor.examine()


class TestSelfTest:
    def test_passes(self):
        assert _self_test.wrong() == []

    def test_sees_each_wrong_number(self, monkeypatch):
        right = _self_test._step

        def step(x, w, dy):
            y, dx, dw = right(x, w, dy)
            return y.at[0, 1, 2, 3].add(1), dx + 1, dw

        monkeypatch.setattr(_self_test, "_step", step)
        assert _self_test.wrong() == [
            "1 of 1120 numbers of y are wrong",
            "1152 of 1152 numbers of dx are wrong",
        ]

    def test_is_three_calls_of_cudnn_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(_load, "local_device", lambda: None)
        traced = jax.jit(_self_test._step).trace(*_self_test._operands())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count(_load.TARGET) == 3
        said = _self_test.wrong(jax.devices("cpu")[0])  # which is no GPU
        assert said == ["cuDNN computes 0 of the 3 convolutions"]

    def test_sums_are_exact(self):
        """Of numbers that TF32 holds, and smaller than float32 counts."""
        x, w, dy = (np.abs(array) for array in _self_test._operands())
        assert max(array.max() for array in _self_test._define(x, w, dy)) < 2**11

    def test_is_judged(self):
        check = _doctor.check_self_test
        found = "passed: forward and both gradients, by cuDNN"
        assert check(lambda: [], [H200]) == Finding("self-test", found)
        remedy = "remedy the faults above first; if there is none, please report this output"
        expected = (Fault("y is wrong", remedy), Fault("dx is wrong", remedy))
        finding = check(lambda: ["y is wrong", "dx is wrong"], [])
        assert finding == Finding("self-test", "failed, by XLA on the CPU", expected)

        def fail():
            raise RuntimeError("INTERNAL: it broke\nat length")

        assert check(fail, [H200]).faults == (Fault("INTERNAL: it broke", remedy),)


class TestKnownFaults:
    def test_are_those_of_the_gpu_and_the_libraries(self):
        rows = _load.native().known_faults(sm=86, cudnn=92301, cublaslt=130601)
        (row,) = [row for row in rows if row.sm != "any"]
        assert (row.op, row.engine, row.sm, row.cudnn) == (
            "fprop", "eng5", "86", ">= 9.23.1, < 9.24.0",
        )  # fmt: skip
        assert (row.cublaslt, row.dtypes, row.condition) == ("any", "any", "any")
        assert row.fault == "not deterministic"
        assert str(row) == (
            "eng5, fprop, sm 86, cuDNN >= 9.23.1, < 9.24.0: not deterministic "
            "(https://github.com/pytorch/pytorch/pull/189207)"
        )
        rows = _load.native().known_faults(sm=86, cudnn=92400, cublaslt=130601)
        assert all(row.sm == "any" for row in rows)

    def test_are_listed_where_cudnn_is(self, monkeypatch):
        """And the libraries' versions are those in the process."""
        asked = {}

        def known_faults(**versions):
            asked.update(versions)
            return ["a row"]

        native = SimpleNamespace(
            __file__="/a", ffi_api_version=lambda: (0, 3), known_faults=known_faults
        )
        monkeypatch.setattr(_load, "native", lambda: native)
        monkeypatch.setattr(_doctor_facts, "library", lambda names, before: WHEEL)
        monkeypatch.setattr(_doctor_facts, "cublaslt_version", lambda library: 130601)
        for cudnn, rows in ((FOUND, [Finding("not used", "a row")]), (Cudnn(None), [])):
            monkeypatch.setattr(_doctor_facts, "cudnn", lambda *_, cudnn=cudnn: cudnn)
            findings = _doctor.examine()
            assert [f for f in findings if f.what == "not used"] == rows
        assert asked["cudnn"] == 91900
        assert asked["cublaslt"] == 130601


@pytest.mark.parametrize(
    ("devices", "versions", "wants", "wanted"),
    [
        ((), VERSIONS, True, True),
        ((), VERSIONS, False, False),
        ((), CPU_VERSIONS, True, False),
        ((H200,), CPU_VERSIONS, False, True),
    ],
)
def test_what_is_missing_is_a_fault_where_cuda_is_wanted(
    monkeypatch, devices, versions, wants, wanted
):
    monkeypatch.setattr(_doctor_facts, "start_jax", lambda: Gpus(devices))
    monkeypatch.setattr(_doctor_facts, "versions", lambda: versions)
    monkeypatch.setattr(_doctor_facts, "wants_cuda", lambda platforms: wants)
    monkeypatch.setattr(_doctor_facts, "cudnn", lambda *_: Cudnn(None, error="no cuDNN"))
    monkeypatch.setattr(_doctor_facts, "library", lambda names, before: None)
    monkeypatch.setattr(_self_test, "wrong", lambda *_: [])
    faulty = {finding.what for finding in _doctor.examine() if finding.faults}
    names = {"cuDNN", "libcublasLt", "libcudart", "libnvrtc"}
    assert faulty & names == (names if wanted else set())


@pytest.mark.gpu
def test_no_fault_on_a_gpu(tmp_path):
    path = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    clean = [folder for folder in path if not Path(folder or ".", "libcudnn.so.9").exists()]
    lines = run_python(
        "from jaxcudnn.__main__ import main; print(main(['doctor']))",
        LD_LIBRARY_PATH=os.pathsep.join(clean),
        JAXCUDNN_STORE=str(tmp_path / "choices"),
    )
    assert lines[-2:] == ["No fault was found.", "0"], "\n".join(lines)
    found = dict(line.split(": ", 1) for line in lines[:-3])
    assert found["self-test"].strip() == "passed: forward and both gradients, by cuDNN"
    assert "compute capability" in found["GPU 0"]
    assert "GiB" in found["GPU 0"]
    assert any(line.startswith("not used:") and "eng20, wgrad" in line for line in lines)


def test_report_is_aligned_by_the_longest_name():
    report = _command_doctor.report([Finding("a", "1"), Finding("four", "2")])
    assert report.splitlines()[:2] == ["a:    1", "four: 2"]
