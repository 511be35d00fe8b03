# SPDX-License-Identifier: Apache-2.0
"""When routes are taken, what is said of it, and that everything around a convolution stays."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcudnn
import lowered
from aot import shaped
from cases import integers
from jaxcudnn import Options, _load, _lowering, _options, _primitives, _reference, _routes
from jaxcudnn._explain import explain
from plan_stand_ins import Plan, StandIn

NWC, NHWC, NDHWC = ("NWC", "OWI", "NWC"), ("NHWC", "OHWI", "NHWC"), ("NDHWC", "ODHWI", "NDHWC")


@pytest.fixture(name="no_gpu", autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


@pytest.fixture(name="gpu")
def with_a_gpu(monkeypatch, no_gpu):
    return StandIn().install(monkeypatch)


def conv(x, w, strides: Any, padding: Any = "VALID", numbers=NHWC, **arguments):
    return jaxcudnn.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=numbers, **arguments
    )


def all_passes(x, w, **arguments):
    y, pullback = jax.vjp(partial(conv, **arguments), x, w)
    return y, pullback(y)


def routes_of(x, w, dtype="bfloat16", **arguments) -> list[str]:
    """Of the output, of dx and of dw."""
    x, w = shaped(x, dtype), shaped(w, dtype)
    found = {row.op: row.route for row in explain(partial(all_passes, **arguments))(x, w)}
    return [found[op] for op in ("fprop", "dgrad", "wgrad")]


EMBEDDING = {"x": (8, 224, 224, 3), "w": (96, 16, 16, 3), "strides": (16, 16)}
STEM = {"x": (8, 224, 224, 3), "w": (64, 7, 7, 3), "strides": (2, 2), "padding": "SAME"}
CAUSAL = {
    "x": (4, 4096, 128), "w": (128, 4, 1), "strides": (1,), "padding": ((3, 0),), "numbers": NWC,
    "feature_group_count": 128,
}  # fmt: skip
LARGE = {
    "x": (4, 32, 32, 256), "w": (256, 31, 31, 1), "strides": (1, 1), "padding": "SAME",
    "feature_group_count": 256,
}  # fmt: skip
NARROW = {"x": (8, 224, 224, 3), "w": (64, 3, 3, 3), "strides": (1, 1), "padding": "SAME"}
TAKEN = {"matmul": EMBEDDING, "space_to_depth": STEM, "shifts": CAUSAL, "toeplitz": LARGE}


class TestRules:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("name", TAKEN)
    def test_taken_in_every_pass(self, name, dtype):
        expected = [name] * 3
        if (name, dtype) == ("toeplitz", "float32"):
            expected[0] = "cuDNN"
        assert routes_of(**TAKEN[name], dtype=dtype) == expected

    def test_large_windows(self):
        assert routes_of(**LARGE, dtype="float32", precision="highest") == ["cuDNN"] * 3
        many = {
            "x": (4, 32, 32, 400), "w": (400, 31, 31, 1), "strides": (1, 1), "padding": "SAME",
            "feature_group_count": 400,
        }  # fmt: skip
        assert routes_of(**many, dtype="float32") == ["cuDNN", "cuDNN", "toeplitz"]
        smaller = {**LARGE, "w": (256, 13, 13, 1)}
        assert routes_of(**smaller) == ["toeplitz", "toeplitz", "cuDNN"]
        assert routes_of(**smaller, dtype="float32") == ["cuDNN"] * 3

    def test_single_positions_with_few_outputs(self):
        head = {"x": (2, 96, 96, 96, 32), "w": (4, 1, 1, 1, 32), "strides": (1, 1, 1)}
        assert routes_of(**head, numbers=NDHWC) == ["matmul"] * 3
        assert routes_of(**head, numbers=NDHWC, dtype="float32") == ["cuDNN"] * 3
        few_inputs = {**head, "x": (2, 96, 96, 96, 4), "w": (32, 1, 1, 1, 4)}
        assert routes_of(**few_inputs, numbers=NDHWC) == ["matmul"] * 3
        few_of_both = {**head, "x": (2, 96, 96, 96, 4), "w": (6, 1, 1, 1, 4)}
        assert routes_of(**few_of_both, numbers=NDHWC) == ["cuDNN"] * 3

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, ("blocks", "cuDNN")),
            ({"w": (3, 3, 3, 64), "x": (8, 224, 224, 64)}, ("cuDNN", "blocks")),
            ({"w": (16, 3, 3, 16), "x": (8, 224, 224, 16)}, ("blocks", "blocks")),
            ({"w": (32, 5, 5, 16), "x": (8, 224, 224, 16)}, ("blocks", "blocks")),
            ({"w": (32, 3, 3, 8), "x": (8, 224, 224, 8)}, ("cuDNN", "blocks")),
            ({"w": (32, 3, 3, 32), "x": (8, 224, 224, 32)}, ("blocks", "blocks")),
            ({"w": (40, 3, 3, 32), "x": (8, 224, 224, 32)}, ("cuDNN", "cuDNN")),
            ({"w": (32, 3, 3, 32), "x": (8, 224, 225, 32)}, ("cuDNN", "cuDNN")),
            ({"w": (64, 3, 3, 3), "x": (8, 224, 228, 3)}, ("cuDNN", "cuDNN")),
            ({"w": (384, 3, 3, 3)}, ("cuDNN", "cuDNN")),
            ({"x": (1, 224, 224, 3)}, ("cuDNN", "cuDNN")),
            ({"strides": (2, 1), "w": (64, 3, 3, 16), "x": (8, 224, 224, 16)}, ("cuDNN", "cuDNN")),
            ({"numbers": ("NCHW", "OIHW", "NCHW"), "x": (8, 3, 224, 224), "w": (64, 3, 3, 3)},
             ("cuDNN", "cuDNN")),
        ],
        ids=str,
    )  # fmt: skip
    def test_narrow_ones(self, changes, expected, dtype):
        """By blocks, whole ones, of which a block fills what cuDNN's plans want."""
        assert routes_of(**{**NARROW, **changes}, dtype=dtype) == [*expected, "cuDNN"]
        assert routes_of(**{**NARROW, **changes}, dtype="float32") == ["cuDNN"] * 3

    def test_one_channel(self):
        """For which cuDNN has a plan in float16."""
        layer = {**NARROW, "x": (8, 224, 224, 1), "w": (64, 3, 3, 1)}
        assert routes_of(**layer) == ["blocks", "cuDNN", "cuDNN"]
        assert routes_of(**layer, dtype="float16") == ["cuDNN"] * 3

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({**EMBEDDING, "x": (8, 224, 224, 8), "w": (96, 16, 16, 8)}, "channels enough"),
            ({**EMBEDDING, "x": (2, 224, 224, 3), "w": (9, 16, 16, 3)}, "small"),
            ({**STEM, "x": (8, 226, 226, 3), "strides": (1, 1)}, "no stride"),
            ({**STEM, "rhs_dilation": (2, 2)}, "a dilated window"),
            ({**STEM, "x": (8, 224, 224, 9), "w": (64, 7, 7, 9)}, "channels enough"),
            ({**CAUSAL, "w": (128, 9, 1), "padding": "SAME"}, "more taps"),
            ({**CAUSAL, "strides": (2,)}, "a stride"),
            ({**CAUSAL, "w": (256, 4, 1)}, "two outputs to an input"),
            ({**LARGE, "w": (256, 12, 14, 1)}, "a smaller window"),
            ({**LARGE, "strides": (1, 2)}, "a stride in the last dimension"),
            ({"x": (8, 56, 56, 64), "w": (256, 1, 1, 64), "strides": (1, 1)}, "1x1"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_not_taken(self, changes, reason):
        assert routes_of(**changes) == ["cuDNN"] * 3

    def test_layouts_do_not_matter(self):
        channels_first = {
            "x": (8, 3, 224, 224), "w": (16, 16, 3, 96), "strides": (16, 16),
            "numbers": ("NCHW", "HWIO", "NCHW"),
        }  # fmt: skip
        assert routes_of(**channels_first) == ["matmul"] * 3

    def test_three_dimensions(self):
        sizes = {"x": (2, 16, 112, 112, 3), "w": (96, 2, 16, 16, 3), "strides": (2, 16, 16)}
        assert routes_of(**sizes, numbers=NDHWC) == ["matmul"] * 3

    def test_transposed_patches(self):
        """The output of a vision decoder: pixels of every patch from its vector."""

        def decode(y, w):
            return jaxcudnn.conv_transpose(y, w, (16, 16), "VALID", None, NHWC)

        (row,) = explain(decode)(shaped((8, 14, 14, 96)), shaped((3, 16, 16, 96)))
        assert (row.op, row.route) == ("dgrad", "matmul")


class TestOptions:
    @pytest.mark.parametrize("name", TAKEN)
    def test_none(self, name):
        for routes in (False, [other for other in _routes.KINDS if other != name]):
            found = routes_of(**TAKEN[name], options={"routes": routes})
            assert name not in found
        assert routes_of(**TAKEN[name], options={"routes": False}) == ["cuDNN"] * 3

    def test_one(self):
        """A patch embedding is a strided convolution, too."""
        assert routes_of(**EMBEDDING, options={"routes": ["space_to_depth"]}) == (
            ["space_to_depth"] * 3
        )

    def test_fft_has_to_be_named(self):
        assert routes_of(**LARGE, options={"routes": True}) == ["toeplitz"] * 3
        assert routes_of(**LARGE, options={"routes": ["fft"]}) == ["fft"] * 3

    @pytest.mark.parametrize("name", TAKEN)
    def test_a_plan_that_is_named_is_used(self, name):
        found = routes_of(**TAKEN[name], options={"algorithm": {"dgrad": "eng1"}})
        assert found == [name, "cuDNN", name]
        found = routes_of(**TAKEN[name], options={"algorithm": "exhaustive"})
        assert found == [name] * 3

    def test_deterministic(self):
        """Matrix products are chosen by XLA's timing."""
        chosen = {"deterministic": True}
        assert routes_of(**EMBEDDING, options=chosen) == ["space_to_depth"] * 3
        for name in ("space_to_depth", "shifts", "toeplitz"):
            assert routes_of(**TAKEN[name], options=chosen) == [name] * 3

    @pytest.mark.parametrize(
        ("precision", "options", "expected"),
        [
            (None, {}, "DEFAULT"),
            ("high", {}, "DEFAULT"),
            ("highest", {}, "HIGHEST"),
            (("highest", "default"), {}, "HIGHEST"),
            (None, {"allow_tf32": False}, "HIGHEST"),
        ],
    )
    def test_precision(self, precision, options, expected):
        sizes = dict(EMBEDDING)
        x, w = shaped(sizes.pop("x"), "float32"), shaped(sizes.pop("w"), "float32")
        text = lowered.text(partial(conv, precision=precision, options=options, **sizes), x, w)
        (line,) = (line for line in text.splitlines() if "stablehlo.dot_general" in line)
        assert re.findall(r"precision = \[(\w+), (\w+)\]", line) == [(expected, expected)]

    @pytest.mark.parametrize("precision", [None, "highest"])
    def test_precision_of_cudnns(self, precision):
        for sizes in (dict(STEM), dict(LARGE)):
            x, w = shaped(sizes.pop("x"), "float32"), shaped(sizes.pop("w"), "float32")
            (row,) = explain(partial(conv, precision=precision, **sizes))(x, w)
            assert row.allow_tf32 == (precision is None)


class TestExplain:
    def test_computed_by_xla(self, gpu):
        sizes = dict(EMBEDDING)
        found = explain(lambda x, w: conv(x, w, (16, 16)))(shaped(sizes["x"]), shaped(sizes["w"]))
        (row,) = found
        assert (row.route, row.reason, row.plan, row.microseconds) == ("matmul", "", "", None)
        assert str(found).splitlines()[-1] == "1 convolution, 0 by cuDNN, 1 by other routes"
        assert "first run" not in str(found)

    def test_computed_by_cudnn(self, gpu):
        gpu.plans["fprop"] = Plan()
        found = explain(lambda x, w: conv(x, w, (2, 2), "SAME"))(
            shaped(STEM["x"]), shaped(STEM["w"])
        )
        (row,) = found
        assert (row.route, row.plan, row.microseconds) == ("space_to_depth", "eng5_k1=0", 20.0)
        assert str(found).splitlines()[-1].startswith("1 convolution, 1 by cuDNN; 20 us")

    def test_not_known_yet(self, gpu):
        found = explain(lambda x, w: conv(x, w, (2, 2), "SAME"))(
            shaped(STEM["x"]), shaped(STEM["w"])
        )
        assert "first run" in str(found)

    def test_in_pieces(self, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 8 * 224 * 224 * 3)
        sizes = {**EMBEDDING, "x": (16, 224, 224, 3)}
        assert routes_of(**sizes) == ["matmul in 2 pieces"] * 3

    def test_tuning_leaves_nothing_to_lax(self, gpu):
        arguments = shaped(EMBEDDING["x"]), shaped(EMBEDDING["w"])
        tuned = jaxcudnn.tune(lambda x, w: conv(x, w, (16, 16)), *arguments, progress=False)
        assert (len(tuned), tuned.left_to_lax) == (0, 0)

    def test_installed(self):
        def f(x, w):
            return lax.conv_general_dilated(x, w, (16, 16), "VALID", dimension_numbers=NHWC)

        arguments = shaped(EMBEDDING["x"]), shaped(EMBEDDING["w"])
        with jaxcudnn.installed():
            (row,) = explain(f)(*arguments)
            text = lowered.text(f, *arguments)
        assert row.route == "matmul"
        assert "stablehlo.dot_general" in text and lowered.count(text) == (0, 0)


def test_epilogues_are_left_to_xla():
    def f(x, w, bias):
        return jaxcudnn.conv_bias_act(
            x, w, bias, activation="relu", window_strides=(16, 16), padding="VALID",
            dimension_numbers=NHWC,
        )  # fmt: skip

    arguments = shaped(EMBEDDING["x"]), shaped(EMBEDDING["w"]), shaped((96,))
    (row,) = explain(f)(*arguments)
    assert (row.route, row.unfused) == (
        "matmul", "the convolution is computed by the route matmul",
    )  # fmt: skip
    with jaxcudnn.options(routes=False):
        assert explain(f)(*arguments)[0].unfused != row.unfused


def test_epilogues_are_fused_where_a_route_saves_less():
    def f(x, w, bias):
        return jaxcudnn.conv_bias_act(
            x, w, bias, activation="relu", window_strides=(1, 1), padding="SAME",
            dimension_numbers=NHWC,
        )  # fmt: skip

    arguments = shaped(NARROW["x"]), shaped(NARROW["w"]), shaped((64,))
    (row,) = explain(f)(*arguments)
    with jaxcudnn.options(routes=False):
        assert explain(f)(*arguments)[0].unfused == row.unfused
    (row,) = explain(lambda x, w: conv(x, w, (1, 1), "SAME"))(*arguments[:2])
    assert row.route == "blocks"


def test_programs_do_not_depend_on_the_gpu(monkeypatch):
    arguments = shaped(EMBEDDING["x"]), shaped(EMBEDDING["w"])
    f = partial(conv, strides=(16, 16))
    elsewhere = lowered.text(f, *arguments)
    StandIn().install(monkeypatch)
    assert lowered.text(f, *arguments) == elsewhere


SMALL = {
    "matmul": ((2, 6, 9, 3), (4, 3, 3, 3), {"strides": (3, 3)}),
    "space_to_depth": ((2, 7, 8, 3), (8, 3, 3, 3), {"strides": (2, 2), "padding": "SAME"}),
    "blocks": ((2, 4, 6, 3), (4, 3, 3, 3), {"strides": (1, 1), "padding": "SAME"}),
    "shifts": (
        (2, 9, 4), (4, 4, 1),
        {"strides": (1,), "padding": ((3, 0),), "numbers": NWC, "feature_group_count": 4},
    ),
    "toeplitz": (
        (2, 16, 17, 2), (2, 16, 16, 1),
        {"strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
    ),
}  # fmt: skip


class TestAroundThem:
    """Derivatives and vmap, each primitive computed as it is lowered on CUDA."""

    @pytest.fixture(autouse=True)
    def computed_as_on_cuda(self, monkeypatch):
        """Without plans, so that what is cuDNN's is `lax`'s in its turn."""
        self.taken: list[str] = []

        def compute(a, b, *, op, spec, layout):
            def report(step):
                self.taken.append(step.route)

            reference = getattr(_reference, op)
            return _lowering._lower(
                a, b, op=op, reference=reference, spec=spec, layout=layout, report=report
            )

        monkeypatch.setattr(_routes, "FEWEST_ELEMENTS", 0)
        blocks = _routes.KINDS["blocks"]._replace(is_faster=lambda op, spec: True)
        monkeypatch.setitem(_routes.KINDS, "blocks", blocks)  # not only for large ones in 16 bits
        monkeypatch.setattr(_lowering, "_workspace", lambda attributes, **_: None)
        for op in ("fprop", "dgrad", "wgrad"):
            primitive = getattr(_primitives, f"conv_{op}_p")
            monkeypatch.setattr(primitive, "impl", partial(compute, op=op))

    @pytest.mark.parametrize("name", SMALL)
    @pytest.mark.parametrize("transform", ["gradients", "second", "vmap"])
    def test_values(self, name, transform):
        x_shape, w_shape, arguments = SMALL[name]
        x, w = integers(1, x_shape), integers(2, w_shape)

        def loss(convolve, x, w):
            return (convolve(x, w) ** 2).sum()

        def second(convolve, x, w):
            gradient = jax.grad(partial(loss, convolve), argnums=(0, 1))
            return jax.jvp(gradient, (x, w), (jnp.ones_like(x), jnp.ones_like(w)))[1]

        def mapped(convolve, x, w):
            gradient = jax.grad(partial(loss, convolve), argnums=(0, 1))
            return jax.vmap(gradient, in_axes=(0, None))(jnp.stack([x, x + 1]), w)

        run = {
            "gradients": lambda f, x, w: jax.grad(partial(loss, f), argnums=(0, 1))(x, w),
            "second": second,
            "vmap": mapped,
        }[transform]
        computed = run(partial(conv, **arguments), x, w)
        assert name in self.taken
        arguments = {**arguments, "dimension_numbers": arguments.get("numbers", NHWC)}
        arguments.pop("numbers", None)
        theirs = partial(
            lax.conv_general_dilated, window_strides=arguments.pop("strides"),
            padding=arguments.pop("padding", "VALID"), **arguments,
        )  # fmt: skip
        for ours, expected in zip(computed, run(theirs, x, w), strict=True):
            np.testing.assert_array_equal(ours, expected)

    @pytest.mark.parametrize("name", SMALL)
    @pytest.mark.parametrize(
        ("dtype", "result"),
        [("float8_e4m3fn", "bfloat16"), ("bfloat16", "float32"), ("int8", "float32")],
    )
    def test_other_dtypes(self, name, dtype, result):
        x_shape, w_shape, arguments = SMALL[name]
        x, w = integers(1, x_shape, dtype), integers(2, w_shape, dtype)
        computed = conv(x, w, **arguments, preferred_element_type=result)
        # Of eight bits these products are in float32, without tensor cores.
        taken = "" if (name, dtype) == ("toeplitz", "int8") else name
        assert self.taken[-1:] == [taken] and computed.dtype == result
        with jax.disable_jit():
            expected = conv(
                x.astype("float32"), w.astype("float32"), **arguments, options={"routes": False}
            )
        np.testing.assert_array_equal(computed, expected.astype(result))


@pytest.mark.parametrize("name", [*TAKEN, "blocks"])
def test_inside_shard_map(name):
    """Lowered for CUDA, where the types of arrays say over which mesh axes they vary."""
    sizes = dict({**TAKEN, "blocks": NARROW}[name])
    x, w = shaped(sizes.pop("x")), shaped(sizes.pop("w"))
    mesh = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,))
    f = jax.shard_map(
        partial(all_passes, **sizes), mesh=mesh, in_specs=(jax.P("d"), jax.P()),
        out_specs=(jax.P("d"), (jax.P("d"), jax.P())),
    )  # fmt: skip
    lowered.text(f, x, w)


def test_names_of_options_are_those_of_routes():
    names = (*_options.ROUTES, *_options.INEXACT_ROUTES)
    assert sorted(names) == sorted(_routes.KINDS)
    assert [name for name in names if Options().allows_route(name)] == [*_options.ROUTES]
