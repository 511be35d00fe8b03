# SPDX-License-Identifier: Apache-2.0
"""The example script at a small size: what it prints and draws, and when it exits with an error."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from jax import lax
from matplotlib.image import imread

import jaxcudnn

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_digits.py"

# Five forward convolutions, five weight gradients, and all input gradients but the first layer's.
CONVOLUTIONS = 14


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Let optax raise a float to the power of an integer."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def small_run(example: ModuleType, path: Path, *arguments: str) -> int:
    small = ["--epochs", "1", "--min-accuracy", "0.3", "--check", "--output", str(path)]
    return example.main([*small, *arguments])


def assert_is_a_figure(path: Path) -> None:
    pixels = imread(path)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 1200
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trains_on_cpu(example, tmp_path, capsys, dtype):
    path = tmp_path / "new" / "digits.png"
    assert small_run(example, path, "--dtype", dtype) == 0
    out, err = capsys.readouterr()
    assert f"on cpu: 0 through cuDNN (jaxcudnn_conv), {CONVOLUTIONS} through XLA" in out
    assert re.search(r"against lax: largest relative difference \d\.\de[-+]\d\d \(\w+ \w+\)", out)
    assert re.search(r"Test accuracy \d\d\.\d% \(\d+ of 360\) after \d+ s; figure in .*png", out)
    assert "1/1" in err  # the progress bar
    assert_is_a_figure(path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trains_on_gpu(example, tmp_path, capsys, dtype):
    path = tmp_path / "digits.png"
    assert small_run(example, path, "--dtype", dtype) == 0
    out = capsys.readouterr().out
    assert f": {CONVOLUTIONS} through cuDNN (jaxcudnn_conv), 0 through XLA" in out
    assert jax.devices()[0].device_kind in out
    assert_is_a_figure(path)


def test_low_accuracy_is_an_error(example, tmp_path, capsys, monkeypatch):
    log_probabilities = np.full((360, 10), -np.inf)
    log_probabilities[:, 3] = 0
    history = example.History(np.ones((1, 22)), np.ones(1), log_probabilities)
    monkeypatch.setattr(example, "train", lambda *_: history)
    assert example.main(["--output", str(tmp_path / "digits.png")]) == 1
    out, err = capsys.readouterr()
    assert "Test accuracy 10.3% (37 of 360)" in out
    assert "Less than the 97.0% of --min-accuracy." in err


@pytest.mark.parametrize("error", [1e-3, np.nan])
def test_wrong_gradients_are_an_error(example, tmp_path, capsys, monkeypatch, error):
    def wrong(*args, **kwargs):
        y = lax.conv_general_dilated(*args, **kwargs)
        return y + np.float32(error) * (y - lax.stop_gradient(y))

    monkeypatch.setattr(jaxcudnn, "conv_general_dilated", wrong)
    assert small_run(example, tmp_path / "digits.png") == 1
    assert "Wrong gradients." in capsys.readouterr().err


def test_bound_grows_with_the_epsilon_of_the_dtype(example):
    bound = {dtype: example.gradient_bound(np.dtype(dtype)) for dtype in (np.float32, np.float16)}
    assert 1e-5 < bound[np.float32] < 1e-3 < bound[np.float16] < 0.1


def test_epochs_must_be_positive(example, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--epochs", "0"])
    assert "--epochs must be at least 1, got 0" in capsys.readouterr().err
