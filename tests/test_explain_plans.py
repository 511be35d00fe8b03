# SPDX-License-Identifier: Apache-2.0
"""What `explain` says of routes and plans, and how it looks."""

from functools import partial
from typing import Any

import jax
import pytest
from jax import export, lax

import jaxcudnn
from aot import shaped
from jaxcudnn import _explain, _load, _lowering, _plans, _roofline
from jaxcudnn._collect import Source
from jaxcudnn._explain import explain
from plan_stand_ins import COMPILED, FIRST, TENSOR_CORE, Plan, StandIn

NHWC = ("NHWC", "OHWI", "NHWC")
X, W = shaped((8, 16, 16, 4), "float32"), shaped((4, 3, 3, 4), "float32")


def conv(x, w, strides=(1, 1), padding: Any = "SAME", **arguments):
    return jaxcudnn.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=NHWC, **arguments
    )


@pytest.fixture(name="no_gpu", autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


@pytest.fixture(autouse=True)
def options_by_default():
    """Whatever the environment of the tests says."""
    with jaxcudnn.options(algorithm="measure"):
        yield


@pytest.fixture(name="gpu")
def with_a_gpu(monkeypatch, no_gpu):
    return StandIn().install(monkeypatch)


class TestRoute:
    def reasons(self, f, *arguments):
        return [(row.route, row.reason) for row in explain(f)(*arguments)]

    def test_cudnn(self):
        assert self.reasons(conv, X, W) == [("cuDNN", "")]

    def test_integers(self):
        x, w = shaped(X.shape, "int8"), shaped(W.shape, "int8")
        assert self.reasons(conv, x, w) == [
            ("lax", "cuDNN computes wrong numbers from integers to integers")
        ]

    def test_no_dtype(self):
        x, w = shaped(X.shape, "int32"), shaped(W.shape, "int32")
        f = partial(conv, preferred_element_type="float32")
        assert self.reasons(f, x, w) == [
            (
                "lax",
                "cuDNN computes in no dtype that keeps all of int32 and int32 for a float32 sum",
            )
        ]

    @pytest.mark.parametrize("rank", [0, 4])
    def test_rank(self, rank):
        x, w = shaped((2, 3, *[4] * rank), "float32"), shaped((2, 3, *[3] * rank), "float32")
        f = partial(jaxcudnn.conv_general_dilated, window_strides=(1,) * rank, padding="VALID")
        assert self.reasons(f, x, w) == [
            ("lax", f"cuDNN takes 1 to 3 spatial dimensions, and it has {rank}")
        ]

    def test_large_numbers(self):
        x, w = shaped((1, 1, 3, 3)), shaped((1, 1, 1, 1))
        f = partial(jaxcudnn.conv_fprop, padding=2**30, stride=2**31 - 1)
        assert self.reasons(f, x, w) == [
            ("lax", f"cuDNN keeps numbers in 32 bits, and it has one of {2**31 + 3}")
        ]

    def test_empty(self):
        dy = w = shaped((1, 1, 2), "float32")
        f = lambda dy, w: jaxcudnn.conv_dgrad(dy, w, (0,), pre_padding=1, post_padding=2)  # noqa: E731
        assert self.reasons(f, dy, w) == [("lax", "an array is empty")]

    def test_symbolic_number_of_images(self):
        x = jax.ShapeDtypeStruct(export.symbolic_shape("n, 16, 16, 4"), "float32")
        assert self.reasons(conv, x, W) == [("cuDNN", "")]

    def test_symbolic_number_of_images_has_no_plan_yet(self, gpu):
        x = jax.ShapeDtypeStruct(export.symbolic_shape("n, 16, 16, 4"), "float32")
        (row,) = explain(conv, measure=True)(x, W)
        assert (row.plan, row.workspace, gpu.measured) == ("", None, [])
        assert row.spec is not None
        with pytest.raises(ValueError, match=r"plans: the number of images must be known, got n;"):
            jaxcudnn.plans(row.spec)
        (tuned,) = jaxcudnn.tune(conv, x, W, progress=False)
        assert tuned.failure == "the number of images is symbolic; tune for a number"

    def test_other_symbolic_sizes(self):
        x = jax.ShapeDtypeStruct(export.symbolic_shape("8, h, 16, 4"), "float32")
        (row,) = explain(conv)(x, W)
        assert (row.op, row.route, row.call) == ("lax", "lax", "conv_general_dilated")
        assert row.reason == "its sizes are symbolic"
        assert "8xhx16x4 * 4x3x3x4" in str(explain(conv)(x, W))

    def test_written_in_lax(self):
        def f(x, w):
            return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

        (row,) = explain(f)(X, W)
        assert (row.op, row.spec, row.layout) == ("lax", None, None)
        assert (row.route, row.reason) == ("lax", "it is written with jax.lax")
        assert row.stack[0] == (__file__, f.__code__.co_firstlineno + 1, f.__qualname__)
        assert (row.shapes, row.dtypes) == ((X.shape, W.shape), ("float32",) * 3)
        assert row.reading == row.call == "lax.conv_general_dilated"

    def test_in_pieces(self, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 16 * 16 * 4)
        assert self.reasons(conv, X, W) == [("cuDNN in 3 pieces", "")]

    def test_pieces_of_which_cudnn_takes_some(self, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 16 * 16 * 4)
        monkeypatch.setattr(_lowering, "_workspace", lambda a, **_: 0 if a["x"][0] == 3 else None)
        refused = "cuDNN has no plan for it that the options allow"
        assert self.reasons(conv, X, W) == [("cuDNN in 2 pieces, lax in 1", refused)]
        monkeypatch.setattr(_lowering, "_workspace", lambda attributes, **_: None)
        assert self.reasons(conv, X, W) == [("lax", refused)]

    def test_no_plan(self, gpu):
        gpu.has_plans = False
        assert self.reasons(conv, X, W) == [
            ("lax", "cuDNN has no plan for it that the options allow")
        ]

    def test_is_what_is_lowered(self, no_gpu):
        """The same number of calls as in the program."""

        def f(x, w, i):
            y = jax.jit(conv)(conv(x, w), w)
            return jax.grad(lambda x: (conv(x, w) ** 2).sum())(y), conv(i, i[:, :3, :3])

        arguments = X, W, shaped((4, 16, 16, 4), "int8")
        by_cudnn = sum(row.count for row in explain(f)(*arguments) if not row.reason)
        lowered = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        # A function that is called twice is one in the text.
        assert by_cudnn == lowered.count(f"custom_call @{_load.TARGET}(") == 4


class TestPlans:
    def test_none_without_a_gpu(self):
        found = explain(conv)(X, W)
        assert not found.has_gpu
        (row,) = found
        assert (row.plan, row.notes, row.workspace, row.tried, row.chosen) == ("", (), None, 0, "")
        assert (row.microseconds, row.floor_microseconds, row.share) == (None, None, None)
        assert "without a GPU here, plans are chosen where the program runs" in str(found)

    def test_known(self, gpu):
        gpu.plans["fprop"] = Plan(notes=(TENSOR_CORE, COMPILED))
        (row,) = explain(conv)(X, W)
        assert (row.plan, row.workspace, row.tried) == ("eng5_k1=0", 4096, 7)
        assert (row.chosen, row.microseconds) == ("measured", 20.0)
        assert row.notes == ("tensor core", "runtime compilation")
        assert gpu.measured == []

    def test_share_of_the_roofline(self, gpu):
        gpu.plans["fprop"] = Plan(microseconds=200.0)
        (row,) = explain(conv)(X, W)
        elements = 2 * 8 * 16 * 16 * 4 + 4 * 3 * 3 * 4
        assert row.floor_microseconds == pytest.approx(4 * elements / 1e12 * 1e6)
        assert row.share == pytest.approx(4 * elements / 1e12 * 1e6 / 200.0)

    def test_roofline_is_of_what_cudnn_is_given(self, gpu, monkeypatch):
        asked = []
        floor = lambda op, spec, attributes: asked.append((op, spec.x_shape))  # noqa: E731
        monkeypatch.setattr(_roofline, "floor_microseconds", floor)
        gpu.plans["fprop"] = Plan()
        numbers, dy = ("NHWC", "HWIO", "NHWC"), shaped((8, 6, 6, 4), "float32")
        (row,) = explain(
            lambda dy, w: jaxcudnn.conv_dgrad(
                dy, w, (8, 8), padding=0, dimension_numbers=numbers
            )
        )(dy, shaped((3, 3, 4, 4), "float32"))  # fmt: skip
        assert (row.op, asked) == ("dgrad", [("fprop", (8, 4, 6, 6))])

    def test_no_memory_to_measure_the_roofline(self, gpu, monkeypatch):
        def fail():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        monkeypatch.setattr(_roofline, "copy_rate", fail)
        gpu.plans["fprop"] = Plan()
        (row,) = explain(conv)(X, W)
        assert row.microseconds == 20.0
        assert (row.floor_microseconds, row.share) == (None, None)

    def test_rates_are_not_measured_for_nothing(self, gpu, monkeypatch):
        monkeypatch.setattr(_roofline, "copy_rate", lambda: pytest.fail("measured"))
        gpu.plans["fprop"] = FIRST
        (row,) = explain(conv)(X, W)
        assert (row.plan, row.chosen) == (FIRST.name, "heuristic")

    def test_not_measured_yet(self, gpu):
        found = explain(conv)(X, W)
        assert found.has_gpu
        assert (found[0].plan, found[0].chosen) == ("", "")
        assert str(found).splitlines()[2].endswith("cuDNN  first run")
        assert "without a GPU" not in str(found)

    def test_measured_on_request(self, gpu):
        (row,) = explain(conv, measure=True)(X, W)
        assert (row.plan, row.microseconds, row.chosen) == ("eng5_k1=0", 20.0, "measured")
        assert [attributes["op"] for attributes in gpu.measured] == ["fprop"]

    def test_each_is_measured_once(self, gpu):
        def f(x, w):
            y = conv(x, w)
            return conv(y, w)

        gpu.plans = {}
        assert len(explain(f, measure=True)(X, W)) == 2
        assert len(gpu.measured) == 1

    def test_what_has_a_time_is_not_measured(self, gpu):
        gpu.plans["fprop"] = Plan()
        explain(conv, measure=True)(X, W)
        assert gpu.measured == []

    def test_time_of_a_plan_that_is_used_without_having_been_measured(self, gpu):
        gpu.plans["fprop"] = FIRST
        with jaxcudnn.options(algorithm="heuristic"):
            (row,) = explain(conv, measure=True)(X, W)
        assert (row.plan, row.microseconds, row.chosen) == (FIRST.name, 31.0, "heuristic")

    def test_pieces_take_the_time_of_all(self, gpu, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 16 * 16 * 4)
        gpu.plans["fprop"] = Plan()
        (row,) = explain(conv)(X, W)
        assert (row.plan, row.microseconds) == ("eng5_k1=0", 60.0)

    def test_no_time_where_lax_computes_a_part(self, gpu, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 16 * 16 * 4)
        monkeypatch.setattr(_lowering, "_workspace", lambda a, **_: 0 if a["x"][0] == 3 else None)
        gpu.plans["fprop"] = Plan()
        (row,) = explain(conv)(X, W)
        assert row.plan == "eng5_k1=0"
        assert (row.microseconds, row.floor_microseconds) == (None, None)

    def test_pieces_of_different_plans(self, gpu, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 16 * 16 * 4)
        small = Plan("eng7", 1 << 20, (COMPILED,), microseconds=5.0, tried=9)
        monkeypatch.setattr(_plans, "known", lambda a, device: Plan() if a["x"][0] == 3 else small)
        (row,) = explain(conv)(X, W)
        assert (row.plan, row.microseconds) == ("eng5_k1=0 + eng7", 45.0)
        assert (row.workspace, row.tried) == (1 << 20, 9)
        assert row.notes == ("tensor core", "runtime compilation")

    def test_one_piece_not_measured_yet(self, gpu, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 16 * 16 * 4)
        monkeypatch.setattr(_plans, "known", lambda a, device: Plan() if a["x"][0] == 3 else None)
        (row,) = explain(conv)(X, W)
        assert (row.plan, row.route) == ("", "cuDNN in 3 pieces")

    def test_tf32(self):
        rows = [explain(partial(conv, precision=p))(X, W)[0] for p in ("default", "highest")]
        assert [row.allow_tf32 for row in rows] == [True, False]
        half = shaped(X.shape, "float16"), shaped(W.shape, "float16")
        texts = [str(explain(partial(conv, precision=p))(X, W)) for p in ("default", "highest")]
        assert ["f32 tf32" in text for text in texts] == [True, False]
        assert "tf32" not in str(explain(conv)(*half))

    def test_measuring_needs_a_gpu(self):
        with pytest.raises(
            RuntimeError,
            match=r"jaxcudnn\.explain: plans must be listed and measured where JAX has an NVIDIA "
            r"GPU, got none in this process; run it on such a machine, with jax\[cuda13\]",
        ):
            explain(conv, measure=True)(X, W)


class TestTable:
    def test_text(self, gpu, monkeypatch):
        monkeypatch.setattr(_explain, "_where", lambda stack: "net.py:31")
        monkeypatch.setattr(_roofline, "copy_rate", lambda: 1e10)
        gpu.plans = {"fprop": Plan("eng62_k2=0_k13=1", microseconds=20.5), "dgrad": FIRST}

        def f(x, w):
            y = conv(x, w, (2, 1), [(1, 2), (1, 1)], precision="highest")
            z = jaxcudnn.conv_transpose(y, w, (2, 1), "SAME", dimension_numbers=NHWC)
            return lax.conv(z, z[:1, :, :3, :3], (1, 1), "SAME")

        assert str(explain(f)(X, W)).splitlines() == EXPECTED.strip().splitlines()

    def test_where(self):
        inner, outer = Source("/a/net.py", 31, "block"), Source("/a/train.py", 5, "loss")
        assert _explain._where(()) == ""
        assert _explain._where((inner,)) == "net.py:31"
        assert _explain._where((inner, outer, outer)) == "net.py:31 < train.py:5"
        assert _explain._where((inner, inner._replace(line=58))) == "net.py:31 < :58"

    def test_html_has_all_and_is_escaped(self, gpu, monkeypatch):
        name = "eng62_k2=0_k13=1_k17=200_k18=<b>"
        gpu.plans = {"fprop": Plan(name)}
        html = explain(conv)(X, W)._repr_html_()
        assert "eng62_k2=0_k13=1_k17=200_k18=&lt;b&gt;" in html
        assert name not in html
        assert html.count("<tr>") == html.count("</tr>") == 2
        assert html.count("<th>") == html.count("<td style=")

    def test_reasons_are_in_html(self):
        x, w = shaped(X.shape, "int8"), shaped(W.shape, "int8")
        html = explain(conv)(x, w)._repr_html_()
        assert "<ol><li>left to lax: cuDNN computes wrong numbers from integers" in html

    def test_width(self, gpu):
        """A training step of ordinary layers fits a wide terminal."""
        plan = Plan("eng62_k2=0_k13=1_k17=200", microseconds=1234.0)
        gpu.plans = {op: plan for op in ("fprop", "dgrad", "wgrad")}

        def loss(x, w):
            return (conv(x, w, (2, 2), [(1, 2), (0, 1)], rhs_dilation=(2, 2)) ** 2).sum()

        x, w = shaped((128, 112, 112, 64)), shaped((256, 3, 3, 64))
        text = str(explain(jax.grad(loss, argnums=(0, 1)))(x, w))
        assert len(text.splitlines()) == 2 + 3 + 1
        assert max(map(len, text.splitlines())) <= 165

    def test_each_reason_is_said_once(self):
        def f(i):
            y = conv(i, i[:, :3, :3])
            return conv(y, i[:, :2, :2])

        text = str(explain(f)(shaped((4, 16, 16, 4), "int8")))
        assert text.count("left to lax: ") == 1
        assert text.count("lax [1]") == 2
        assert "2 convolutions, 0 by cuDNN" in text

    def test_times_are_summed(self, gpu):
        gpu.plans["fprop"] = Plan()

        def f(x, w):
            for _ in range(2):
                x = conv(x, w)
            return x

        assert "2 convolutions, 2 by cuDNN; 40 us in all" in str(explain(f)(X, W))
        found = explain(jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), argnums=1))(X, W)
        assert "2 convolutions, 2 by cuDNN; 20 us where times are known" in str(found)


EXPECTED = """
n  pass  op         where      convolution                              layout     dtype     route    plan            notes        workspace  choice        us  roof
-  ----  ---------  ---------  ---------------------------------------  ---------  --------  -------  --------------  -----------  ---------  ----------  ----  ----
1  fwd   fprop      net.py:31  8x16x16x4 * 4x3x3x4 /2,1 pad 1:2,1       NHWC/OHWI  f32       cuDNN    eng62_k2=0_k1…  tensor core      4 KiB  measured/7  20.5   25%
1  fwd   dgrad [1]  net.py:31  8x18x16x4 * 4x3x3x4 /2,1 pad 0:1,1 flip  NHWC/IHWO  f32 tf32  cuDNN    eng2_k3=1                          0 B  heuristic
1  fwd   lax        net.py:31  8x18x16x4 * 1x18x3x3                                f32       lax [2]
3 convolutions, 2 by cuDNN; 20.5 us where times are known
[1] conv_transpose read as dgrad
[2] left to lax: it is written with jax.lax
"""  # noqa: E501


class TestSequence:
    def test_is_a_sequence_of_rows(self):
        found = explain(jax.grad(lambda x, w: (conv(x, w) ** 2).sum()))(X, W)
        assert [found[0], found[1]] == list(found) == list(found[:])
        assert isinstance(found[:1], tuple)
        assert repr(found) == str(found)

    def test_is_immutable(self):
        found = explain(conv)(X, W)
        with pytest.raises(AttributeError):
            found.rows = ()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(AttributeError):
            found[0].op = "dgrad"  # pyright: ignore[reportAttributeAccessIssue]

    def test_equal_functions_are_explained_equally(self):
        first, second = (explain(conv)(X, W) for _ in range(2))
        assert first == second
        assert hash(first) == hash(second)
        assert first != explain(conv)(X, shaped((8, 3, 3, 4), "float32"))
