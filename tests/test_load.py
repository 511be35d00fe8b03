# SPDX-License-Identifier: Apache-2.0
"""A missing or unfit extension or cuDNN: one sentence, when CUDA is asked for and not before."""

import os
import re
import shlex
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcudnn
from aot import shaped
from jaxcudnn import _load
from processes import run_python


def conv(x, w):
    return jaxcudnn.conv_fprop(x, w, padding=0)


def lower_for_cuda():
    traced = jax.jit(lambda x, w: conv(x, w)).trace(shaped((1, 2, 4, 4)), shaped((3, 2, 3, 3)))
    traced.lower(lowering_platforms=("cuda",))


def assert_cpu_works():
    x, w = jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 3, 3))
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2)))(x, w)
    np.testing.assert_array_equal(gradient.sum(), 3 * 4 * 2 * 18 * 18)


class TestExtension:
    SENTENCE = (
        r"jaxcudnn: the extension jaxcudnn\._native did not load from \S+/jaxcudnn \({}\); "
        r"run `pip install \.` in a clone of jaxcudnn, and start Python in another folder, "
        r"since a clone's own has no extension$"
    )

    def test_is_missed_on_cuda_alone(self, monkeypatch):
        monkeypatch.setattr(_load, "_native", None)
        error = ImportError("undefined symbol: Zm9v")
        monkeypatch.setattr(_load, "_import_error", error, raising=False)
        with pytest.raises(RuntimeError, match=self.SENTENCE.format(str(error))):
            lower_for_cuda()
        assert_cpu_works()

    def test_that_cannot_be_imported(self):
        said, result = run_python(
            """
            import sys
            sys.modules["jaxcudnn._native"] = None
            import jax, jaxcudnn
            x, w = jax.numpy.ones((1, 2, 4, 4)), jax.numpy.ones((3, 2, 3, 3))
            conv = jax.jit(lambda x, w: jaxcudnn.conv_fprop(x, w, padding=0))
            try:
                conv.trace(x, w).lower(lowering_platforms=("cuda",))
            except RuntimeError as error:
                print(error)
            print(conv(x, w).sum())
            """
        )
        assert re.match(self.SENTENCE.format(".*_native.*"), said), said
        assert float(result) == 3 * 4 * 18


def library(path, source=""):
    """Compile a shared library that is called by its file's name."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not shutil.which(compiler[0]):
        pytest.skip("no C compiler on this machine")
    path.parent.mkdir(parents=True, exist_ok=True)
    options = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-x", "c", "-", "-o", path]
    subprocess.run([*compiler, *options], input=source, text=True, check=True)


class TestCudnn:
    """NVIDIA's wheels are in a folder of the test, and the linker finds nothing elsewhere."""

    PATH = "cudnn/lib/libcudnn.so.9"

    @pytest.fixture(autouse=True)
    def folders(self, tmp_path):
        self.wheels, self.system = tmp_path / "nvidia", tmp_path / "system"
        self.path = self.wheels / self.PATH
        self.path.parent.mkdir(parents=True)
        self.system.mkdir()
        # The linker stops at what is no library, so that the machine's own copies are not found.
        for name in ("libcudnn.so.9", "libcublasLt.so.13", "libcublasLt.so.12"):
            (self.system / name).write_text("hides what comes after it")

    def said(self):
        (line,) = run_python(
            f"""
            from jaxcudnn import _load
            _load._nvidia_folders = lambda: [_load.Path({str(self.wheels)!r})]
            try:
                _load.cudnn()
            except RuntimeError as error:
                print(error)
            """,
            LD_LIBRARY_PATH=str(self.system),
        )
        told, _, looked = line.partition(". NVIDIA's wheels were looked for in ")
        assert looked == str(self.wheels)
        return told

    def cudnn(self, version):
        library(self.wheels / "cu13/lib/libcublasLt.so.13")
        library(self.path, f"unsigned long cudnnGetVersion(void) {{ return {version}; }}")

    def test_too_old(self):
        self.cudnn(90100)
        assert self.said() == (
            f"jaxcudnn: cuDNN 9.1.0 at {self.path} is too old, jaxcudnn needs 9.8.0 or newer; "
            "upgrade nvidia-cudnn-cu13 or nvidia-cudnn-cu12"
        )

    def test_without_a_function(self):
        self.cudnn(91900)
        expected = f"jaxcudnn: cuDNN 9.19.0 at {self.path} has no function cudnnCreate"
        assert self.said() == expected

    def test_absent(self):
        library(self.wheels / "cu13/lib/libcublasLt.so.13")
        said = self.said()
        assert said.startswith("jaxcudnn: cuDNN 9 is not loaded and was not found ("), said
        assert f"({self.path}: cannot open shared object file" in said
        assert f", {self.system}/libcudnn.so.9: " in said  # where the linker looked
        assert said.endswith("); install jax[cuda13] or jax[cuda12]")

    def test_that_does_not_load(self):
        library(self.wheels / "cu13/lib/libcublasLt.so.13")
        self.path.write_text("nonsense")
        assert re.search(rf"was not found \({self.path}: [^,]+", self.said())

    def test_without_cublaslt_is_not_opened(self):
        """cuDNN would end the process."""
        library(self.path, "void abort(void); __attribute__((constructor)) void f(void) {abort();}")
        assert self.said() == (
            "jaxcudnn: cuDNN 9 is not loaded and cannot be, since libcublasLt.so.13 and "
            "libcublasLt.so.12, one of which it needs, are neither loaded nor on the linker's "
            "path; install jax[cuda13] or jax[cuda12], which bring both"
        )

    def test_the_copy_in_the_process_comes_first(self):
        self.cudnn(90100)
        other = self.wheels.parent / "other" / "libcudnn.so.9"
        library(other, "unsigned long cudnnGetVersion(void) { return 90200; }")
        (said,) = run_python(
            f"""
            import ctypes
            ctypes.CDLL({str(other)!r})
            from jaxcudnn import _load
            _load._nvidia_folders = lambda: [_load.Path({str(self.wheels)!r})]
            try:
                _load.cudnn()
            except RuntimeError as error:
                print(error)
            """
        )
        assert said.startswith(f"jaxcudnn: cuDNN 9.2.0 at {other} is too old")

    def test_is_missed_on_cuda_alone(self, monkeypatch):
        def cudnn():
            raise RuntimeError("jaxcudnn: cuDNN 9 is not loaded")

        monkeypatch.setattr(_load, "cudnn", cudnn)
        monkeypatch.setattr(_load, "local_device", lambda: 0)
        with pytest.raises(RuntimeError, match="jaxcudnn: cuDNN 9 is not loaded"):
            lower_for_cuda()
        assert_cpu_works()

    def test_is_not_missed_where_there_is_no_gpu(self, monkeypatch):
        def cudnn():
            raise AssertionError("cuDNN was looked for")

        monkeypatch.setattr(_load, "cudnn", cudnn)
        monkeypatch.setattr(_load, "local_device", lambda: None)
        lower_for_cuda()
