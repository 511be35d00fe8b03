# SPDX-License-Identifier: Apache-2.0
"""What `pip install .` gives a reader's type checker."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcudnn

# A pyright comment that no error needs is an error itself.
SCRIPT = """
# pyright: basic, reportUnnecessaryTypeIgnoreComment=true
from typing import assert_type

import jax
import jax.numpy as jnp

import jaxcudnn
from jaxcudnn import _native

x, w = jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 3, 3))
y = assert_type(jaxcudnn.conv_fprop(x, w, padding=1, stride=(2, 2)), jax.Array)
assert_type(jaxcudnn.conv_dgrad(y, w, x.shape[2:], padding=1, stride=2), jax.Array)
assert_type(jaxcudnn.conv_wgrad(x, y, (3, 3), pre_padding=1, post_padding=1), jax.Array)
assert_type(jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME"), jax.Array)
assert_type(jaxcudnn.__version__, str)
assert_type(_native.cudnn_version(), int)
jaxcudnn.conv_fprop(x, w, padding="one")  # pyright: ignore[reportArgumentType]
jaxcudnn.conv_fprop(x, w, paddings=1)  # pyright: ignore[reportCallIssue]
_native.cudnn_version(1)  # pyright: ignore[reportCallIssue]
"""


def test_types_and_the_stub_are_beside_the_extension():
    folder = Path(jaxcudnn.__file__).parent
    assert (folder / "py.typed").is_file()
    assert (folder / "_native.pyi").is_file()
    assert list(folder.glob("_native.*.so"))


@pytest.fixture(name="pyright")
def make_pyright(tmp_path):
    """Runs pyright in an empty folder, so that it looks at what is installed and no source."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    try:
        importlib.metadata.version("jaxcudnn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxcudnn is not installed, only imported")
    # pyright asks the first `python` on the path for its packages.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def pyright(*arguments: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "pyright", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return pyright


def test_a_typed_script_passes(pyright, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert "0 errors, 0 warnings" in pyright("script.py")


def test_every_public_name_has_a_type(pyright):
    said = pyright("--verifytypes", "jaxcudnn", "--ignoreexternal")
    assert 'Path of py.typed file: "' in said
    assert "Type completeness score: 100%" in said
