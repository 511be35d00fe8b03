# SPDX-License-Identifier: Apache-2.0
"""What `explain` says of a function: which convolutions, where they stand, what computes them."""

import doctest
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

import jaxcudnn
from aot import shaped
from jaxcudnn import _collect, _explain, _load, _lowering, _plans, _roofline
from jaxcudnn._collect import Source
from jaxcudnn._explain import Explanation, explain
from plan_stand_ins import COMPILED, FIRST, TENSOR_CORE, Plan, StandIn

pytestmark = pytest.mark.usefixtures("measuring")

NHWC = ("NHWC", "OHWI", "NHWC")
X, W = shaped((8, 16, 16, 4), "float32"), shaped((4, 3, 3, 4), "float32")


def conv(x, w, strides=(1, 1), padding: Any = "SAME", **arguments):
    return jaxcudnn.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=NHWC, **arguments
    )


def with_rule(kind, f):
    """A function with a rule of its own for its derivative, which is not asked for."""
    f = kind(f)
    rules = [lambda *_: pytest.fail("differentiated")] * (2 if kind is jax.custom_vjp else 1)
    (f.defvjp if kind is jax.custom_vjp else f.defjvp)(*rules)
    return f


def line_of(text: str) -> int:
    """The one line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return number


@pytest.fixture(name="no_gpu", autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


@pytest.fixture(name="gpu")
def with_a_gpu(monkeypatch, no_gpu):
    return StandIn().install(monkeypatch)


def ops(explanation: Explanation) -> list[tuple[str, int]]:
    return [(row.op, row.count) for row in explanation]


class TestWhichConvolutions:
    def test_forward(self):
        (row,) = explain(conv)(X, W)
        assert (row.op, row.count, row.backward) == ("fprop", 1, False)
        assert (row.spec.x_shape, row.spec.w_shape) == ((8, 4, 16, 16), (4, 4, 3, 3))
        assert row.layout.x == (0, 3, 1, 2)
        assert row.shapes == (X.shape, W.shape)
        assert row.dtypes == ("float32",) * 3

    def test_gradients(self):
        def loss(x, w):
            return (conv(x, w) ** 2).sum()

        found = explain(jax.grad(loss, argnums=(0, 1)))(X, W)
        assert {(row.op, row.backward) for row in found} == {
            ("fprop", False), ("dgrad", True), ("wgrad", True),
        }  # fmt: skip
        assert len({row.spec for row in found}) == 1

    def test_what_nothing_uses_is_left_out(self):
        """The derivative of a sum needs no output."""
        found = explain(jax.grad(lambda x, w: conv(x, w).sum()))(X, W)
        assert ops(found) == [("dgrad", 1)]

    def test_equal_ones_are_counted(self):
        def f(x, w):
            for _ in range(3):
                x = conv(x, w)
            return x

        assert ops(explain(f)(X, W)) == [("fprop", 3)]

    def test_but_not_those_of_two_lines(self):
        def f(x, w):
            y = conv(x, w)
            return conv(y, w)

        assert ops(explain(f)(X, W)) == [("fprop", 1), ("fprop", 1)]

    def test_other_options_are_another_convolution(self):
        def f(x, w):
            for deterministic in (False, True):
                with jaxcudnn.options(deterministic=deterministic):
                    x = conv(x, w)
            return x

        assert ops(explain(f)(X, W)) == [("fprop", 1), ("fprop", 1)]

    @pytest.mark.parametrize(
        "inside",
        [
            lambda f, x: jax.jit(f)(x),
            lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=5)[0],
            lambda f, x: lax.while_loop(lambda c: c.sum() > 0, f, x),
            lambda f, x: lax.while_loop(lambda c: f(c).sum() > 0, lambda c: c + 1, x),
            lambda f, x: lax.cond(x.sum() > 0, f, lambda x: x, x),
            lambda f, x: lax.cond(x.sum() > 0, lambda x: x, jax.jit(f), x),
            lambda f, x: jax.checkpoint(f)(x),
            lambda f, x: jax.vmap(f)(x[None])[0],
            lambda f, x: with_rule(jax.custom_jvp, f)(x),
            lambda f, x: with_rule(jax.custom_vjp, f)(x),
            lambda f, x: jax.shard_map(
                f,
                mesh=jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,)),
                in_specs=jax.P("d"),
                out_specs=jax.P("d"),
            )(x),
            lambda f, x: lax.custom_linear_solve(f, x, lambda _, y: y),
        ],
        ids=[
            "jit", "scan", "while body", "while condition", "cond", "other branch", "checkpoint",
            "vmap", "custom_jvp", "custom_vjp", "shard_map", "linear solve",
        ],
    )  # fmt: skip
    def test_in_another_function(self, inside):
        found = explain(lambda x, w: inside(lambda x: conv(x, w), x))(X, W)
        assert ops(found) == [("fprop", 1)]

    def test_a_function_called_twice(self):
        f = jax.jit(lambda x, w: conv(x, w))
        assert ops(explain(lambda x, w: f(f(x, w), w))(X, W)) == [("fprop", 2)]

    def test_one_called_a_million_times_is_read_once(self):
        f = jax.jit(lambda x, w: conv(x, w))
        for _ in range(20):
            f = jax.jit(lambda x, w, f=f: f(f(x, w), w))
        assert ops(explain(f)(X, W)) == [("fprop", 1 << 20)]

    def test_backward_inside_another_function(self):
        def loss(x, w):
            return (jax.checkpoint(jax.jit(conv))(x, w) ** 2).sum()

        found = explain(jax.grad(loss))(X, W)
        assert {(row.op, row.backward) for row in found} >= {("fprop", False), ("dgrad", True)}
        # Computed again, because the checkpoint keeps nothing.
        assert all(row.backward for row in found if row.op == "dgrad")

    def test_complex_is_three_real_ones(self):
        x, w = (jax.ShapeDtypeStruct(a.shape, "complex64") for a in (X, W))
        assert sum(row.count for row in explain(conv)(x, w)) == 3

    def test_none(self):
        found = explain(lambda x: x + 1)(X)
        assert len(found) == 0
        assert str(found) == "0 convolutions, 0 by cuDNN"
        assert "0 convolutions" in found._repr_html_()


class TestArguments:
    def test_arrays(self):
        assert ops(explain(conv)(jnp.ones(X.shape), jnp.ones(W.shape))) == [("fprop", 1)]

    def test_others_reach_the_function_as_they_are(self):
        def f(arrays, stride, *, padding, flag):
            assert (stride, flag) == (2, True)
            return (
                conv(arrays["x"], arrays["w"], strides=(stride, stride), padding=padding),
                "text",
                None,
            )

        (row,) = explain(f)({"x": X, "w": W}, 2, padding="VALID", flag=True)
        assert (row.spec.strides, row.spec.padding) == ((2, 2), ((0, 0), (0, 0)))

    def test_by_name(self):
        assert ops(explain(conv)(w=W, x=X)) == [("fprop", 1)]

    def test_static_arguments_of_a_jitted_function(self):
        f = jax.jit(conv, static_argnums=(2, 3))
        (row,) = explain(f)(X, W, (2, 1), "VALID")
        assert row.spec.strides == (2, 1)

    def test_nothing_is_run(self):
        x = jax.ShapeDtypeStruct((1 << 20, 16, 16, 4), "float32")  # 4 GiB
        assert ops(explain(conv)(x, W)) == [("fprop", 1)]

    def test_the_name_is_kept(self):
        assert explain(conv).__name__ == "conv"


class TestSource:
    def test_line(self):
        def layer(x, w):
            return conv_here(x, w)  # the call

        conv_here = partial(
            jaxcudnn.conv_general_dilated,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=NHWC,
        )
        (row,) = explain(jax.jit(layer))(X, W)
        assert row.stack[0].file == __file__
        assert row.stack[0].line == line_of("the call")
        assert row.stack[0].function.endswith("layer")
        assert row.call == "conv_general_dilated"

    def test_gradients_have_the_line_of_the_call(self):
        @jax.jit
        def loss(x, w):
            y = jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME")  # forward
            return (y**2).sum()

        x, w = shaped((2, 3, 8, 8), "float32"), shaped((4, 3, 3, 3), "float32")
        found = explain(jax.grad(loss, argnums=(0, 1)))(x, w)
        assert len(found) == 3
        assert {row.stack[0].line for row in found} == {line_of("forward")}
        assert {row.call for row in found} == {"conv_general_dilated"}

    @pytest.mark.parametrize(
        ("f", "call", "op", "reading"),
        [
            (lambda x, w: jaxcudnn.conv(x, w, (1, 1), "SAME"), "conv", "fprop", "conv"),
            (
                lambda x, w: jaxcudnn.conv_transpose(
                    x, w, (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
                ),
                "conv_transpose",
                "dgrad",
                "conv_transpose read as dgrad",
            ),
            (
                lambda x, w: jaxcudnn.conv_general_dilated(
                    x, w, (1, 1), [(2, 2), (2, 2)], lhs_dilation=(2, 2)
                ),
                "conv_general_dilated",
                "dgrad",
                "conv_general_dilated read as dgrad",
            ),
            (
                lambda x, w: jaxcudnn.conv_dgrad(x, w, (8, 8), padding=1),
                "conv_dgrad",
                "dgrad",
                "conv_dgrad",
            ),
            (
                lambda x, w: jaxcudnn.conv_wgrad(x, x, (3, 3), padding=1),
                "conv_wgrad",
                "wgrad",
                "conv_wgrad",
            ),
            (
                lambda x, w: jax.vjp(lambda x: jaxcudnn.conv_fprop(x, w, padding=1), x)[1](x),
                "conv_fprop",
                "dgrad",
                "dgrad in the backward pass of conv_fprop",
            ),
        ],
        ids=["conv", "conv_transpose", "dilated", "conv_dgrad", "conv_wgrad", "backward"],
    )
    def test_reading(self, f, call, op, reading):
        x, w = shaped((2, 4, 8, 8), "float32"), shaped((4, 4, 3, 3), "float32")
        (row,) = explain(f)(x, w)
        assert (row.call, row.op, row.reading) == (call, op, reading)
        # Said where it may surprise: under a call that is not a gradient and reads as one.
        assert ("read as" in str(explain(f)(x, w))) == ("read as" in reading)

    def test_a_function_of_this_package_has_no_line(self):
        f = partial(jaxcudnn.conv_general_dilated, window_strides=(1, 1), padding="SAME")
        x, w = shaped((2, 4, 8, 8), "float32"), shaped((4, 4, 3, 3), "float32")
        (row,) = explain(f)(x, w)
        assert (row.stack, row.call) == ((), "conv_general_dilated")

    def test_code_that_is_typed_in(self):
        names: dict[str, Any] = {}
        exec(compile("def f(x, w):\n    return g(x, w)\n", "<cell>", "exec"), names)
        names["g"] = partial(
            jaxcudnn.conv_general_dilated,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=NHWC,
        )
        (row,) = explain(names["f"])(X, W)
        assert row.stack == (("<cell>", 2, "f"),)
        assert "<cell>:2" in str(explain(names["f"])(X, W))

    def test_frozen_modules_of_python_are_passed_over(self):
        names: dict[str, Any] = {"f": conv}
        exec(compile("def run(x, w):\n    return f(x, w)\n", "<frozen runpy>", "exec"), names)
        (row,) = explain(names["run"])(X, W)
        assert [source.file for source in row.stack] == [__file__]

    def test_links_are_followed(self, tmp_path):
        """A file has one name, by whichever way it was imported."""
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        names: dict[str, Any] = {"f": jaxcudnn.conv}
        source = "def g(x, w):\n    return f(x, w, (1, 1), 'SAME')\n"
        exec(compile(source, str(tmp_path / "link" / "net.py"), "exec"), names)
        x, w = shaped((2, 4, 8, 8), "float32"), shaped((4, 4, 3, 3), "float32")
        (row,) = explain(names["g"])(x, w)
        assert row.stack == ((str(tmp_path / "real" / "net.py"), 2, "g"),)

    def test_installed_libraries_are_passed_over(self, monkeypatch, tmp_path):
        """A layer of a library is found at the user's line."""
        source = "def layer(conv, x, w):\n    return conv(x, w)\n"
        (tmp_path / "layers.py").write_text(source)
        names: dict[str, Any] = {}
        exec(compile(source, str(tmp_path / "layers.py"), "exec"), names)
        inner = partial(
            jaxcudnn.conv_general_dilated,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=NHWC,
        )

        def f(x, w):
            return names["layer"](inner, x, w)  # the layer

        (row,) = explain(f)(X, W)
        layer = (str(tmp_path / "layers.py"), 2, "layer")
        own = (__file__, line_of("the layer"))
        assert row.stack[0] == layer
        assert row.stack[1][:2] == own
        assert f" layers.py:2 < {own[0].rpartition('/')[2]}"[:10] in str(explain(f)(X, W))
        monkeypatch.setattr(_collect, "_INSTALLED", (f"{tmp_path}/",))
        (row,) = explain(f)(X, W)
        assert [source[:2] for source in row.stack] == [own]
        monkeypatch.setattr(_collect, "_INSTALLED", ("/",))
        (row,) = explain(f)(X, W)
        assert row.stack == (layer,)


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
        x, w = shaped((2**32, 1, 3, 3)), shaped((1, 1, 1, 1))
        assert self.reasons(partial(jaxcudnn.conv_fprop, padding=0), x, w) == [
            ("lax", "cuDNN keeps numbers in 32 bits, and it has one of 4294967296")
        ]

    def test_empty(self):
        dy = w = shaped((1, 1, 2), "float32")
        f = lambda dy, w: jaxcudnn.conv_dgrad(dy, w, (0,), pre_padding=1, post_padding=2)  # noqa: E731
        assert self.reasons(f, dy, w) == [("lax", "an array is empty")]

    def test_symbolic_number_of_images(self):
        x = jax.ShapeDtypeStruct(export.symbolic_shape("n, 16, 16, 4"), "float32")
        assert self.reasons(conv, x, W) == [("lax", "a size is symbolic")]

    def test_other_symbolic_sizes(self):
        x = jax.ShapeDtypeStruct(export.symbolic_shape("8, h, 16, 4"), "float32")
        (row,) = explain(conv)(x, W)
        assert (row.op, row.route, row.call) == ("lax", "lax", "conv_general_dilated")
        assert row.reason == "its sizes are symbolic, or its arrays sharded over explicit mesh axes"
        assert "8xhx16x4 * 4x3x3x4" in str(explain(conv)(x, W))

    def test_written_in_lax(self):
        def f(x, w):
            return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)  # lax

        (row,) = explain(f)(X, W)
        assert (row.op, row.spec, row.layout) == ("lax", None, None)
        assert (row.route, row.reason) == ("lax", "it is written with jax.lax")
        assert row.stack[0][:2] == (__file__, line_of("lax"))
        assert (row.shapes, row.dtypes) == ((X.shape, W.shape), ("float32",) * 3)
        assert row.reading == row.call == "lax.conv_general_dilated"

    def test_in_pieces(self, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 16 * 16 * 4)
        assert self.reasons(conv, X, W) == [("cuDNN in 3 pieces", "")]

    def test_pieces_of_which_cudnn_takes_some(self, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 16 * 16 * 4)
        monkeypatch.setattr(_lowering, "_workspace", lambda a: 0 if a["x"][0] == 3 else None)
        refused = "cuDNN has no plan for it that the options allow"
        assert self.reasons(conv, X, W) == [("cuDNN in 2 pieces, lax in 1", refused)]
        monkeypatch.setattr(_lowering, "_workspace", lambda attributes: None)
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
        assert row.share == pytest.approx(row.floor_microseconds / 200.0)

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
        monkeypatch.setattr(_lowering, "_workspace", lambda a: 0 if a["x"][0] == 3 else None)
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
        found = explain(jax.grad(lambda x, w: (conv(x, w) ** 2).sum()))(X, W)
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


def test_examples(monkeypatch):
    monkeypatch.setattr(jaxcudnn, "explain", explain, raising=False)
    assert doctest.testmod(_explain).attempted > 0
    assert doctest.testmod(_explain).failed == 0
