# SPDX-License-Identifier: Apache-2.0
"""What `tune` measures, what it skips, and what it says meanwhile."""

import io
import math
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcudnn
from aot import shaped
from jaxcudnn import _load, _lowering, _progress
from jaxcudnn._tune import tune
from plan_stand_ins import FIRST, Plan, StandIn, Timing

pytestmark = pytest.mark.usefixtures("measuring")

NHWC = ("NHWC", "OHWI", "NHWC")
X, W = shaped((8, 16, 16, 4), "float32"), shaped((4, 3, 3, 4), "float32")
TEXT = "8x4x16x16 * 4x4x3x3 pad 1 f32"


def conv(x, w, strides=(1, 1)):
    return jaxcudnn.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=NHWC)


def training(x, w):
    """A forward pass of two layers, and the gradients of one of them."""
    y = conv(x, w)
    geometry: dict[str, Any] = {"padding": 1, "dimension_numbers": NHWC}
    dx = jaxcudnn.conv_dgrad(y, w, (16, 16), **geometry)
    return conv(y, w), dx, jaxcudnn.conv_wgrad(x, y, (3, 3), **geometry)


@pytest.fixture(name="gpu")
def with_a_gpu(monkeypatch):
    return StandIn().install(monkeypatch)


def measured(gpu: StandIn) -> list[str]:
    return [attributes["op"] for attributes in gpu.measured]


def test_every_different_convolution_is_measured_once(gpu):
    tuned = tune(training, X, W, progress=False)
    assert sorted(measured(gpu)) == ["dgrad", "fprop", "wgrad"]
    assert (len(tuned), tuned.measured, tuned.skipped, tuned.failed) == (3, 3, 0, 0)
    assert tuned.seconds > 0
    row = tuned[0]
    assert (row.op, row.plan, row.microseconds) == ("fprop", "eng5_k1=0", 20.0)
    assert (row.workspace, row.tried, row.milliseconds, row.measured) == (4096, 2, 64.0, True)
    assert row.spec.x_shape == (8, 4, 16, 16)


def test_a_row_is_of_what_cudnn_is_given(gpu):
    """An input gradient, as a forward convolution of what is as large as the output."""
    dy, w = shaped((8, 6, 6, 4), "float32"), shaped((3, 3, 4, 4), "float32")

    def gradient(dy, w):
        hwio = ("NHWC", "HWIO", "NHWC")
        return jaxcudnn.conv_dgrad(dy, w, (8, 8), padding=0, dimension_numbers=hwio)

    (row,) = tune(gradient, dy, w, progress=False)
    assert measured(gpu) == [row.op] == ["fprop"]
    assert (row.spec.x_shape, row.spec.y_shape) == ((8, 4, 6, 6), (8, 4, 8, 8))


def test_a_second_time_measures_nothing(gpu):
    tune(training, X, W, progress=False)
    tuned = tune(training, X, W, progress=False)
    assert len(gpu.measured) == 3
    assert (tuned.measured, tuned.skipped) == (0, 3)
    assert {(row.plan, row.milliseconds, row.measured) for row in tuned} == {
        ("eng5_k1=0", 0.0, False)
    }


@pytest.mark.parametrize(
    ("source", "options", "is_measured"),
    [
        ("measured", {}, False),
        ("stored", {}, False),
        ("named", {"algorithm": "eng2_k3=1"}, False),
        ("heuristic", {"algorithm": "heuristic"}, False),
        ("heuristic", {"deterministic": True}, True),
    ],
    ids=str,
)
def test_what_is_known(gpu, source, options, is_measured):
    gpu.plans["fprop"] = Plan(source=source)
    with jaxcudnn.options(**options):
        tuned = tune(conv, X, W, progress=False)
    assert measured(gpu) == ["fprop"] * is_measured
    assert (tuned.measured, tuned.skipped) == (is_measured, not is_measured)


def test_options_of_the_scope(gpu):
    with jaxcudnn.options(workspace_limit=77):
        tune(conv, X, W, progress=False)
    assert gpu.measured[0]["workspace_limit"] == 77


def test_arrays_and_other_arguments(gpu):
    tune(conv, jnp.ones(X.shape), w=jnp.ones(W.shape), strides=(2, 1), progress=False)
    assert gpu.measured[0]["stride"] == [2, 1]


def test_pieces(gpu, monkeypatch):
    """Two of three images and one of two, of which each is one convolution."""
    monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 16 * 16 * 4)
    gpu.plans = {}
    tuned = tune(conv, X, W, progress=False)
    assert [row.spec.x_shape[0] for row in tuned] == [3, 2]


def test_what_is_left_to_lax_is_counted(gpu):
    def f(x, w, i):
        y = jax.lax.conv(x, x[:4, :, :3, :3], (1, 1), "SAME")
        return conv(x, w), y, conv(conv(i, i[:, :3, :3]), i[:, :3, :3])

    tuned = tune(f, X, W, shaped((4, 16, 16, 4), "int8"), progress=False)
    assert (len(tuned), tuned.left_to_lax) == (1, 3)
    assert str(tuned).endswith("0 known before, 3 left to lax")


def test_one_that_fails_does_not_stop_the_others(gpu):
    gpu.refused = ("dgrad",)
    tuned = tune(training, X, W, progress=False)
    assert sorted(measured(gpu)) == ["fprop", "wgrad"]
    assert (tuned.measured, tuned.skipped, tuned.failed) == (2, 0, 1)
    (row,) = (row for row in tuned if row.failure)
    assert (row.op, row.plan, row.measured) == ("dgrad", "", False)
    text = str(tuned)
    assert "failed [1]" in text
    assert "1 failed" in text
    assert text.endswith("[1] jaxcudnn: the GPU fell off the bus during dgrad")


def test_nothing_could_be_timed(gpu):
    gpu.timings = [
        Timing(name, math.nan, reason)
        for name, reason in [
            ("eng2_k3=1", "memory is short"),
            ("eng5_k1=0", "it computes 1 for 2"),
            ("eng9", "memory is short"),
        ]
    ]
    tuned = tune(conv, X, W, progress=False)
    assert (tuned.measured, tuned.failed, tuned[0].plan) == (0, 1, "")
    assert tuned[0].failure == "no plan could be timed: memory is short; it computes 1 for 2"


def test_text(gpu):
    gpu.plans["fprop"] = FIRST
    with jaxcudnn.options(algorithm={"fprop": "heuristic"}):
        tuned = tune(training, X, W, progress=False)
    *lines, last = str(tuned).splitlines()
    assert lines == [
        "op     convolution                    plan       us  workspace  tried   cost",
        "-----  -----------------------------  ---------  --  ---------  -----  -----",
        f"fprop  {TEXT}  eng2_k3=1            0 B",
        f"dgrad  {TEXT}  eng5_k1=0  20      4 KiB      2  64 ms",
        f"wgrad  {TEXT}  eng5_k1=0  20      4 KiB      2  64 ms",
    ]
    assert last == f"2 measured in {tuned.seconds:.1f} s, 1 known before"
    assert "<td" in tuned._repr_html_()


def test_is_a_sequence(gpu):
    tuned = tune(training, X, W, progress=False)
    assert list(tuned) == [tuned[0], tuned[1], tuned[2]] == list(tuned[:])
    with pytest.raises(AttributeError):
        tuned.rows = ()  # pyright: ignore[reportAttributeAccessIssue]


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)
    with pytest.raises(
        RuntimeError, match=r"jaxcudnn\.tune: plans must be listed and measured where JAX has an"
    ):
        tune(lambda: pytest.fail("traced"))


class TestProgress:
    def test_a_line_for_each(self, gpu, capsys):
        gpu.plans["fprop"] = Plan()
        gpu.refused = ("wgrad",)
        tune(training, X, W)
        out, lines = capsys.readouterr()
        assert out == ""
        assert lines.splitlines() == [
            f"jaxcudnn.tune 1/3: fprop of {TEXT}: eng5_k1=0, 20 us, known before",
            f"jaxcudnn.tune 2/3: dgrad of {TEXT}: eng5_k1=0, 20 us, measured in 64 ms",
            f"jaxcudnn.tune 3/3: wgrad of {TEXT}: failed, jaxcudnn: the GPU fell off the bus "
            "during wgrad",
        ]

    def test_of_a_plan_without_a_time(self, gpu, capsys):
        gpu.plans["fprop"] = FIRST
        with jaxcudnn.options(algorithm="heuristic"):
            tune(conv, X, W)
        assert capsys.readouterr().err.endswith(": eng2_k3=1, known before\n")

    def test_none_if_not_wanted(self, gpu, capsys):
        tune(training, X, W, progress=False)
        assert capsys.readouterr() == ("", "")

    def test_none_if_there_is_nothing_to_do(self, gpu, capsys):
        assert len(tune(lambda x: x, X)) == 0
        assert capsys.readouterr() == ("", "")

    def in_terminal(self, monkeypatch, *arguments, **options) -> str:
        """What `tune` writes to a terminal."""
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        with monkeypatch.context() as context:
            context.setattr(sys, "stderr", terminal)
            tune(*arguments, **options)
        return terminal.getvalue()

    def test_a_bar_in_a_terminal(self, gpu, monkeypatch):
        pytest.importorskip("tqdm")
        text = self.in_terminal(monkeypatch, training, X, W)
        assert "jaxcudnn.tune: 100%" in text
        assert "3/3" in text
        assert "measured in 64 ms" in text

    def test_the_bar_is_closed(self, gpu, monkeypatch):
        told = []
        bar = SimpleNamespace(
            set_postfix_str=lambda text, refresh: told.append(text),
            update=lambda: None,
            close=lambda: told.append("closed"),
        )
        monkeypatch.setattr(_progress, "_bar", lambda title, total: bar)
        gpu.plans["fprop"] = Plan()
        self.in_terminal(monkeypatch, conv, X, W)
        assert told == [f"fprop of {TEXT}: eng5_k1=0, 20 us, known before", "closed"]

    def test_lines_in_a_terminal_without_tqdm(self, gpu, monkeypatch):
        monkeypatch.setitem(sys.modules, "tqdm", None)
        text = self.in_terminal(monkeypatch, conv, X, W)
        assert text.startswith("jaxcudnn.tune 1/1: fprop of ")

    def test_no_bar_if_not_wanted(self, gpu, monkeypatch):
        assert self.in_terminal(monkeypatch, training, X, W, progress=False) == ""
