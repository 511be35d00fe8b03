# SPDX-License-Identifier: Apache-2.0
"""`install` and `installed`: whose convolutions a program has that is lowered for CUDA."""

import re
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcudnn
import lowered
from aot import shaped
from jaxcudnn import _install, _load
from lowered import convolutions

X, W = shaped((4, 6, 9, 8), "float32"), shaped((6, 6, 3, 3), "float32")
ONE_OF_OURS, ONE_OF_XLAS = (1, 0), (0, 1)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)
    yield
    jaxcudnn.uninstall()


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def loss(x, w):
    return jnp.sum(conv(x, w) ** 2)


def gradient(x, w):
    return jax.grad(loss, argnums=(0, 1))(x, w)


class TestWhereItHolds:
    def test_in_a_block(self):
        assert convolutions(gradient, X, W) == (0, 3)
        with jaxcudnn.installed():
            assert convolutions(conv, X, W) == ONE_OF_OURS
            assert convolutions(gradient, X, W) == (3, 0)
        assert convolutions(gradient, X, W) == (0, 3)

    def test_everywhere(self):
        jaxcudnn.install()
        assert convolutions(gradient, X, W) == (3, 0)
        jaxcudnn.uninstall()
        assert convolutions(gradient, X, W) == (0, 3)

    def test_twice(self):
        jaxcudnn.install(exclude=lambda _: True)
        jaxcudnn.install()
        assert convolutions(conv, X, W) == ONE_OF_OURS
        jaxcudnn.uninstall()
        assert convolutions(conv, X, W) == ONE_OF_XLAS
        jaxcudnn.uninstall()
        assert convolutions(conv, X, W) == ONE_OF_XLAS

    def test_the_innermost_block_decides(self):
        jaxcudnn.install()
        with jaxcudnn.installed(False):
            assert convolutions(conv, X, W) == ONE_OF_XLAS
            with jaxcudnn.installed():
                assert convolutions(conv, X, W) == ONE_OF_OURS
            assert convolutions(conv, X, W) == ONE_OF_XLAS
        with jaxcudnn.installed(exclude=lambda _: True), jaxcudnn.installed():
            assert convolutions(conv, X, W) == ONE_OF_OURS
        assert convolutions(conv, X, W) == ONE_OF_OURS

    def test_an_error_ends_a_block(self):
        with pytest.raises(ZeroDivisionError), jaxcudnn.installed():
            raise ZeroDivisionError
        assert convolutions(conv, X, W) == ONE_OF_XLAS

    def test_a_function_is_decorated(self):
        assert convolutions(jaxcudnn.installed()(gradient), X, W) == (3, 0)
        assert convolutions(jaxcudnn.installed(False)(gradient), X, W) == (0, 3)

    @pytest.mark.parametrize("everywhere", [True, False])
    def test_other_threads(self, everywhere: bool):
        found = []
        thread = threading.Thread(target=lambda: found.append(convolutions(conv, X, W)))
        if everywhere:
            jaxcudnn.install()
        with jaxcudnn.installed(not everywhere):
            thread.start()
            thread.join()
        assert found == [ONE_OF_OURS if everywhere else ONE_OF_XLAS]


class TestCaches:
    def test_a_function_that_was_traced_before(self):
        jitted = jax.jit(gradient)
        before = lowered.text(jitted, X, W)
        with jaxcudnn.installed():
            assert convolutions(jitted, X, W) == (3, 0)
        assert lowered.text(jitted, X, W) == before
        jaxcudnn.install()
        assert convolutions(jitted, X, W) == (3, 0)
        jaxcudnn.uninstall()
        assert lowered.text(jitted, X, W) == before

    def test_what_was_compiled_is_compiled_again_once(self):
        traced = []

        @jax.jit
        def f(x):
            traced.append(None)
            return conv(x, jnp.ones(W.shape))

        x = jnp.ones(X.shape)
        f(x)
        for _ in range(2):
            with jaxcudnn.installed():
                f(x)
            assert len(traced) == 2
            f(x)
        jaxcudnn.install()
        f(x)
        jaxcudnn.uninstall()
        f(x)
        assert len(traced) == 2

    def test_ahead_of_time(self):
        """What counts is the context of the lowering, unless it was said while tracing."""
        outside = jax.jit(conv).trace(X, W)
        with jaxcudnn.installed():
            inside = jax.jit(conv).trace(X, W)
            assert lowered.count(inside.lower(lowering_platforms=("cuda",)).as_text()) == (1, 0)
        assert lowered.count(outside.lower(lowering_platforms=("cuda",)).as_text()) == (0, 1)


class TestWithinATrace:
    """Where a program is lowered after the block that was said in it."""

    def test_a_part_is_left_to_xla(self):
        def f(x, w):
            y = conv(x, w)
            with jaxcudnn.installed(False):
                y = conv(y, w)
                with jaxcudnn.installed():
                    y = conv(y, w)
                y = jax.jit(conv)(y, w)
            return jnp.sum(conv(y, w) ** 2)

        with jaxcudnn.installed():
            assert convolutions(f, X, W) == (3, 2)
            assert convolutions(jax.grad(f, argnums=(0, 1)), X, W) == (9, 6)
        assert convolutions(f, X, W) == (1, 4)

    def test_what_is_excluded_cannot_be_said_there(self):
        def f(x, w):
            with jaxcudnn.installed(exclude=lambda _: True):
                return conv(x, w)

        with pytest.raises(
            TypeError,
            match=r"jaxcudnn.installed: exclude must be None inside a function that is being "
            r"traced, got <function .*installed\(False\)",
        ):
            jax.jit(f).trace(X, W)

    @pytest.mark.parametrize("transform", [jax.vmap, lambda f: f])
    def test_gradients_taken_outside(self, transform):
        def f(x, w):
            with jaxcudnn.installed():
                y = conv(x, w)
            return jnp.sum(y**2)

        xs = shaped((2, *X.shape), "float32") if transform is jax.vmap else X
        ws = shaped((2, *W.shape), "float32") if transform is jax.vmap else W
        assert convolutions(transform(jax.grad(f, argnums=(0, 1))), xs, ws) == (3, 0)

    def test_nothing_is_marked_outside_of_a_trace(self):
        with jaxcudnn.installed():
            assert "frontend_attributes" not in lowered.text(conv, X, W)

    def test_install_in_a_trace_computes_the_same(self):
        def f(x, w):
            jaxcudnn.install()
            return conv(x, w)

        x, w = jnp.ones(X.shape), jnp.ones(W.shape)
        np.testing.assert_array_equal(jax.jit(f)(x, w), conv(x, w))
        assert convolutions(conv, X, W) == ONE_OF_OURS
        jaxcudnn.uninstall()
        assert convolutions(conv, X, W) == ONE_OF_XLAS


def scanned(x, w):
    return jnp.sum(lax.scan(lambda x, _: (conv(x, w), None), x, length=3)[0])


@jax.checkpoint
def rematerialised(x, w):
    return jnp.sum(jnp.sin(conv(jnp.sin(conv(x, w)), w)))


@jax.custom_vjp
def with_own_vjp(x, w):
    return conv(x, w)


with_own_vjp.defvjp(
    lambda x, w: (conv(x, w), w),
    lambda w, ct: (conv(ct, w), conv(w, w)),
)

BOTH = partial(jax.grad, argnums=(0, 1))
XS, WS = shaped((2, *X.shape), "float32"), shaped((2, *W.shape), "float32")
TRANSFORMED = {
    "vmap": (jax.vmap(conv, (None, 0)), X, WS),
    "vmap of both": (jax.vmap(conv), XS, WS),
    "vmap of grad": (jax.vmap(gradient, (0, None)), XS, W),
    "jvp": (lambda x, w: jax.jvp(conv, (x, w), (x, w)), X, W),
    "jvp of grad": (lambda x, w: jax.jvp(gradient, (x, w), (x, w)), X, W),
    "grad of grad": (BOTH(lambda x, w: jnp.sum(gradient(x, w)[1] ** 2)), X, W),
    "scan": (BOTH(scanned), X, W),
    "remat": (BOTH(rematerialised), X, W),
    "custom_vjp": (BOTH(lambda x, w: jnp.sum(with_own_vjp(x, w))), X, W),
    "cond": (lambda x, w: lax.cond(x.sum() > 0, conv, lambda x, w: x, x, w), X, W),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms(name: str):
    of_xla = convolutions(*TRANSFORMED[name])
    with jaxcudnn.installed():
        ours = convolutions(*TRANSFORMED[name])
    assert of_xla.ours == ours.xla == 0
    assert ours.ours == of_xla.xla > 0


DOCS = (Path(__file__).parents[1] / "docs" / "install.md").read_text(encoding="utf-8")


def test_the_code_of_the_docs(capsys):
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert "2 convolutions, 2 by cuDNN" in capsys.readouterr().out
    x, w, v = X, W, W
    with jaxcudnn.installed():
        assert convolutions(names["network"], x, w, v) == (1, 1)
        assert convolutions(names["layer"], x, w) == ONE_OF_XLAS
    pointwise = shaped((6, 6, 1, 1), "float32")
    with jaxcudnn.installed(exclude=names["is_pointwise"]):
        assert convolutions(names["model"], x, pointwise) == ONE_OF_XLAS
        assert convolutions(names["model"], x, w) == ONE_OF_OURS


class TestExclusion:
    def test_of_some(self):
        def without_gradients_by_filters(call: jaxcudnn.LaxConvolution) -> bool:
            return call.out_shape == W.shape

        with jaxcudnn.installed(exclude=without_gradients_by_filters):
            assert convolutions(gradient, X, W) == (2, 1)
        jaxcudnn.install(without_gradients_by_filters)
        assert convolutions(gradient, X, W) == (2, 1)

    def test_what_a_function_is_told(self):
        seen = []
        x, w = shaped((2, 9, 8, 6), "bfloat16"), shaped((3, 2, 3, 4), "bfloat16")

        def f(x, w):
            return lax.conv_general_dilated(
                x, w, (2, 1), [(1, 0), (2, -1)], (1, 2), (1, 3), ("NHWC", "HWIO", "NHWC"), 2,
                preferred_element_type=jnp.float32,
            )  # fmt: skip

        with jaxcudnn.installed(exclude=lambda call: bool(seen.append(call))):
            assert convolutions(f, x, w) != ONE_OF_XLAS
        assert seen == [
            jaxcudnn.LaxConvolution(
                lhs_shape=(2, 9, 8, 6),
                rhs_shape=(3, 2, 3, 4),
                out_shape=(2, 4, 13, 4),
                dtype="bfloat16",
                result_dtype="float32",
                window_strides=(2, 1),
                padding=((1, 0), (2, -1)),
                lhs_dilation=(1, 2),
                rhs_dilation=(1, 3),
                dimension_numbers=lax.ConvDimensionNumbers(
                    (0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)
                ),
                feature_group_count=2,
                batch_group_count=1,
            )
        ]

    @pytest.mark.parametrize("caller", ["install", "installed"])
    def test_errors(self, caller: str):
        text = f"jaxcudnn.{caller}: exclude must be a function of a .*, got 'stem'; write exclude="
        with pytest.raises(TypeError, match=text):
            if caller == "install":
                jaxcudnn.install("stem")  # pyright: ignore[reportArgumentType]
            else:
                jaxcudnn.installed(exclude="stem").__enter__()  # pyright: ignore[reportArgumentType]
        assert convolutions(conv, X, W) == ONE_OF_XLAS

    def test_something_where_a_truth_value_belongs(self):
        text = "jaxcudnn.installed: active must be True or False, got 'stem'; write exclude='stem'"
        with pytest.raises(TypeError, match=text), jaxcudnn.installed("stem"):  # pyright: ignore
            pass

    def test_nothing_to_exclude_from(self):
        text = "jaxcudnn.installed: exclude must be None where active is False, got .*; leave it"
        with pytest.raises(ValueError, match=text), jaxcudnn.installed(False, exclude=bool):
            pass

    def test_a_jax_that_keeps_its_rule_elsewhere(self, monkeypatch):
        monkeypatch.setattr(_install.mlir, "_platform_specific_lowerings", {})
        monkeypatch.setattr(_install, "_stock", _install._stock_rule())
        text = "jaxcudnn.install(ed)?: JAX must keep its own rule .*, got jax .*; take jax 0.10 to"
        with pytest.raises(RuntimeError, match=text):
            jaxcudnn.install()
        with pytest.raises(RuntimeError, match=text), jaxcudnn.installed():
            pass
        jaxcudnn.uninstall()
        with jaxcudnn.installed(False):
            pass  # asks for nothing
