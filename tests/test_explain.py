# SPDX-License-Identifier: Apache-2.0
"""What `explain` says of a function: which convolutions, where they stand, what computes them."""

import doctest
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcudnn
from aot import shaped
from jaxcudnn import _collect, _explain, _load
from jaxcudnn._explain import Explanation, explain
from plan_stand_ins import StandIn

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
        assert row.spec is not None and row.layout is not None
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
        assert row.spec is not None
        assert (row.spec.strides, row.spec.padding) == ((2, 2), ((0, 0), (0, 0)))

    def test_by_name(self):
        assert ops(explain(conv)(w=W, x=X)) == [("fprop", 1)]

    def test_static_arguments_of_a_jitted_function(self):
        f = jax.jit(conv, static_argnums=(2, 3))
        (row,) = explain(f)(X, W, (2, 1), "VALID")
        assert row.spec is not None and row.spec.strides == (2, 1)

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


def test_examples(monkeypatch):
    monkeypatch.setattr(jaxcudnn, "explain", explain, raising=False)
    assert doctest.testmod(_explain).attempted > 0
    assert doctest.testmod(_explain).failed == 0
