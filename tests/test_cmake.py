# SPDX-License-Identifier: Apache-2.0
"""Configuring a build that lacks something: the message says what, and what to do about it."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# In the order in which they are looked for: file, variable, remedy.
HEADERS = [
    (
        "cuda_runtime_api.h",
        "CUDA_INCLUDE_DIR",
        "Install nvidia-cuda-runtime from the package index, or set -DCUDA_INCLUDE_DIR.",
    ),
    (
        "crt/host_defines.h",
        "CUDA_CRT_INCLUDE_DIR",
        "Install nvidia-cuda-crt from the package index, or set -DCUDA_CRT_INCLUDE_DIR.",
    ),
    (
        "nvrtc.h",
        "NVRTC_INCLUDE_DIR",
        "Install nvidia-cuda-nvrtc from the package index, or set -DNVRTC_INCLUDE_DIR.",
    ),
    (
        "cudnn_frontend.h",
        "CUDNN_FRONTEND_INCLUDE_DIR",
        "Install nvidia-cudnn-frontend==1.28.0 from the package index, or set "
        "-DCUDNN_FRONTEND_INCLUDE_DIR.",
    ),
    (
        "cudnn.h",
        "CUDNN_INCLUDE_DIR",
        "Reach the package index, install nvidia-cudnn-cu13, or set -DCUDNN_INCLUDE_DIR.",
    ),
]


def program(name: str) -> str:
    """One that pip installed beside this Python, or else the machine's."""
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    path = shutil.which(name, path=folders)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture(name="configure")
def make_configure(tmp_path):
    """Runs CMake with further options; gives its exit status and what it says, in one line.

    No header is found but Python's own, and the package index is out of reach.
    """
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("nanobind is not installed")
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    command = [
        *(program("cmake"), "-S", ROOT, "-B", tmp_path / "build"),
        *("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={program('ninja')}"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}",
        f"-DCMAKE_FIND_ROOT_PATH={nowhere}",
        "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY",
    ]
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}

    def configure(*options: str, **environment: str) -> tuple[int, str]:
        ran = subprocess.run(
            [*command, *options],
            env=os.environ | offline | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        return ran.returncode, " ".join(ran.stdout.split())

    return configure


def test_each_missing_header_is_named_with_the_remedy_until_there_is_none(configure, tmp_path):
    given = []
    for header, variable, remedy in HEADERS:
        status, said = configure("-DSKBUILD=1", *given)
        assert status == 1
        assert f"{header} was not found" in said
        assert remedy in said
        assert [name for name, *_ in HEADERS if f"{name} was not found" in said] == [header]
        given.append(f"-D{variable}={tmp_path / variable}")
    status, said = configure(*given)
    assert status == 0, said
    assert "CMake Warning" not in said
    for header, variable, _ in HEADERS:
        assert f"-- {header}: {tmp_path / variable} " in said


def test_missing_nanobind(configure, tmp_path):
    package = tmp_path / "path" / "nanobind"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    status, said = configure("-DSKBUILD=1", PYTHONPATH=str(package.parent))
    assert status == 1
    assert (
        f"nanobind was not found by {sys.executable}. Build with `pip install .`, or install "
        "nanobind there for a build without isolation."
    ) in said


def test_supported_way_to_build_is_named(configure):
    _, said = configure()
    warning = "This file is run by `pip install .`; that is the supported way to build jaxcudnn."
    assert warning in said
