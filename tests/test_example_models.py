# SPDX-License-Identifier: Apache-2.0
"""The examples of whole models at small sizes: what they print, and when they exit with 1."""

import importlib
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import steps
from jaxcudnn import _load
from processes import run_python

# The arguments of a small run of each script, the extra it needs, and the convolutions of a step.
SMALL: dict[str, tuple[str, str, int]] = {
    "resnet_nnx": ("--epochs 1 --width 8 --blocks 1 --min-accuracy 0.2 --check", "flax", 26),
    "unet3d_equinox": ("--size 8 --channels 8 16 --batch 2 --steps 8", "equinox", 29),
    "audio_decoder": (
        "--batch 2 --frames 8 --channels 16 --sizes 3 --dilations 1 3 --steps 6",
        "jax",
        65,
    ),
    "per_example_gradients": ("--epochs 1 --noise 0 --min-accuracy 0.2 --check", "sklearn", 8),
}
TIMES = r"first step \d+\.\d s, then \d+\.\d ms a step; loss (\d+\.\d{4}) .* (\d+\.\d{4}) before"


@pytest.fixture(autouse=True)
def as_libraries_expect() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def example(name: str) -> Any:
    pytest.importorskip(SMALL[name][1])
    return importlib.import_module(name)


def small_run(name: str, *arguments: str) -> int:
    return example(name).main([*SMALL[name][0].split(), *arguments])


@pytest.mark.parametrize("name", SMALL)
def test_trains_on_cpu(name: str, capsys):
    assert small_run(name) == 0
    out, err = capsys.readouterr()
    assert f"on cpu: 0 through cuDNN (jaxcudnn_conv), {SMALL[name][2]} through XLA" in out
    times = re.search(TIMES, out)
    assert times is not None and float(times[1]) > float(times[2])
    assert "step/s" in err or "s/step" in err  # the progress bar
    if "--check" in SMALL[name][0]:
        assert re.search(r"relative difference \d\.\de[-+]\d\d; rounding allows \d\.\de-0[23]", out)


@pytest.mark.parametrize("name", SMALL)
def test_all_are_cudnns_on_cuda(name: str, monkeypatch):
    class Lowered(Exception):
        pass

    def lower(step, state, batches, total):
        traced = jax.jit(step).trace(state, next(iter(batches)))
        raise Lowered(steps.implementation(traced.lower(lowering_platforms=("cuda",))))

    module = example(name)
    monkeypatch.setattr(_load, "local_device", lambda: None)
    monkeypatch.setattr(steps, "run", lower)
    if hasattr(module, "check"):
        monkeypatch.setattr(module, "check", lambda *_: True)
    with pytest.raises(Lowered, match=f"^{SMALL[name][2]} through cuDNN .*, 0 through XLA"):
        small_run(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_trains_on_gpu(name: str, capsys):
    assert small_run(name) == 0
    out = capsys.readouterr().out
    assert f"on {jax.devices()[0].device_kind}: " in out
    assert f": {SMALL[name][2]} through cuDNN (jaxcudnn_conv), 0 through XLA" in out


def test_stock_modules_learn_alike(capsys):
    """In float32 on one platform, to the last bit: here at one size, so with few convolutions."""
    losses, small = [], ("--channels", "8", "--steps", "2", "--dtype", "float32")
    for arguments in [(), ("--stock",)]:
        assert small_run("unet3d_equinox", *small, *arguments) == 0
        out = capsys.readouterr().out
        assert (", float32, " in out) and ("Equinox, " in out) == bool(arguments)
        losses.append(re.findall(r"\d\.\d{4}", out))
    assert losses[0] == losses[1] != []


KERAS = "import sys, keras_application; sys.exit(keras_application.main(ARGUMENTS))"


def keras_run(*arguments: str) -> str:
    """In a process of its own, since Keras reads its backend once."""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    folder = str(steps.__file__).rpartition("/")[0]
    script = f"import sys; sys.path.insert(0, {folder!r}); ARGUMENTS = {list(arguments)}\n{KERAS}"
    return "\n".join(run_python(script))


@pytest.mark.slow
def test_keras_on_cpu():
    out = keras_run("MobileNet", "--size", "32", "--batch", "2")
    assert "of MobileNet, on cpu: 0 through cuDNN (jaxcudnn_conv), 83 through XLA" in out
    assert "On CUDA, cuDNN takes 83 of the 83 convolutions of a step" in out
    assert "Loss and gradients: relative difference 0.0e+00; rounding allows" in out


def test_called_functions_count_at_each_call():
    @jax.jit
    def twice(x, w):
        y = lax.conv(x, w, (1, 1), "SAME")
        return lax.conv(y, w, (1, 1), "SAME")

    x, w = jnp.ones((1, 4, 8, 8)), jnp.ones((4, 4, 3, 3))
    lowered = jax.jit(lambda x, w: twice(twice(x, w), w)).lower(x, w)
    assert steps.implementation(lowered).startswith("0 through cuDNN (jaxcudnn_conv), 4 through")


def test_distance_and_bound():
    ours, theirs = {"w": np.array([3.0, 4.0]), "b": np.array(12.0)}, {"w": np.zeros(2), "b": 13.0}
    assert steps.distance(ours, theirs) == pytest.approx(26**0.5 / 13)
    assert 1e-3 < steps.relu_bound(5, 100) < steps.relu_bound(50, 10000) < 1e-1


@pytest.mark.parametrize("name", ["resnet_nnx", "per_example_gradients"])
@pytest.mark.parametrize("error", [1.0, np.nan])
def test_wrong_gradients_are_an_error(name: str, capsys, monkeypatch, error: float):
    module = example(name)
    monkeypatch.setattr(steps, "distance", lambda ours, theirs: error)
    monkeypatch.setattr(module, "train", lambda *_: pytest.fail("trained all the same"))
    monkeypatch.setattr(jax, "jit", lambda f: lambda *_: (np.zeros(1), {"w": np.zeros((1, 1))}))
    if name == "resnet_nnx":
        monkeypatch.setattr(module.nnx, "jit", lambda f: lambda *_: None)
    assert small_run(name) == 1
    out, err = capsys.readouterr()
    assert f"relative difference {error:.1e}; rounding allows" in out
    assert "Wrong gradients." in err


@pytest.mark.parametrize("name", ["resnet_nnx", "per_example_gradients"])
def test_low_accuracy_is_an_error(name: str, capsys, monkeypatch):
    module = example(name)
    if name == "resnet_nnx":
        model = type("Model", (), {"eval": lambda self: None})()
        monkeypatch.setattr(module.nnx, "jit", lambda f: lambda model, images: np.eye(360, 10))
    else:
        model = module.init(jax.random.key(0))
        monkeypatch.setattr(module, "logits", lambda params, images: np.eye(360, 10))
    monkeypatch.setattr(module, "train", lambda *_: model)
    assert module.main(["--min-accuracy", "0.95"]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"^Test accuracy \d?\d\.\d% \(\d+ of 360\)$", out, re.MULTILINE)
    assert "Less than the 95.0% of --min-accuracy." in err


@pytest.mark.parametrize("name", ["unet3d_equinox", "audio_decoder"])
@pytest.mark.parametrize("last", [2.0, np.nan])
def test_loss_that_does_not_fall_is_an_error(name: str, capsys, monkeypatch, last: float):
    run = steps.Run(None, np.array([1.5, last]), 2.0, np.nan)
    monkeypatch.setattr(example(name), "train", lambda args: run)
    assert small_run(name) == 1
    out, err = capsys.readouterr()
    said = f"first step 2.0 s; loss 1.5000 before the first and {last:.4f} before step 2"
    assert said in out and "The loss has not fallen." in err


WRONG = [
    ("resnet_nnx", "--epochs 0", "--epochs must be at least 1, got 0"),
    ("resnet_nnx", "--width 0", "--width must be at least 1, got 0"),
    ("resnet_nnx", "--blocks 0", "--blocks must be at least 1, got 0"),
    ("unet3d_equinox", "--steps 1", "--steps must be at least 2, so that the loss can fall, got 1"),
    ("unet3d_equinox", "--batch 0", "--batch must be at least 1, got 0"),
    ("unet3d_equinox", "--size 12", "--size must be a positive multiple of 8, since 4 numbers of"),
    ("unet3d_equinox", "--channels 12", "--channels must be multiples of 8, or less than 8, got"),
    ("audio_decoder", "--steps 1", "--steps must be at least 2, so that the loss can fall, got 1"),
    ("audio_decoder", "--batch 0", "--batch must be at least 1, got 0"),
    ("audio_decoder", "--frames 3", "--frames must be at least 4, one window of a spectrum, got 3"),
    ("audio_decoder", "--channels 24", "--channels must be a multiple of 16, for four halves, got"),
    ("audio_decoder", "--sizes 3 0", "--sizes must be at least 1, got [3, 0]"),
    ("audio_decoder", "--dilations 0", "--dilations must be at least 1, got [0]"),
    ("per_example_gradients", "--epochs 0", "--epochs must be at least 1, got 0"),
    ("per_example_gradients", "--clip 0", "--clip must be positive and finite, got 0"),
    ("per_example_gradients", "--noise -1", "--noise must be finite and not negative, got -1"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), WRONG)
def test_wrong_arguments(name: str, arguments: str, message: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        example(name).main(arguments.split())
    assert message in capsys.readouterr().err


def test_clipped_gradients():
    module = example("per_example_gradients")
    gradients = {"a": jnp.array([[3.0], [0.3], [0.0]]), "b": jnp.array([[4.0], [0.4], [0.0]])}
    total, norms = module.clip(gradients, 1.0)
    np.testing.assert_allclose(norms, [5, 0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(total["a"], [0.9], rtol=1e-6)
    np.testing.assert_allclose(total["b"], [1.2], rtol=1e-6)


def test_noise_has_the_deviation_asked_for():
    module = example("per_example_gradients")
    zeros = {"a": jnp.zeros(10000), "b": jnp.zeros(10000)}
    noisy = module.add_noise(jax.random.key(0), zeros, 3.0)
    assert np.std(noisy["a"]) == pytest.approx(3, rel=0.05)  # 7 standard deviations of its own
    assert abs(np.corrcoef(noisy["a"], noisy["b"])[0, 1]) < 0.05
