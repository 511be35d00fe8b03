# SPDX-License-Identifier: Apache-2.0
"""`conv_bias_act` without a GPU: its values, what it takes, and what is fused on CUDA."""

import functools
import itertools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import cases
import jaxcudnn
import oracle
from aot import parse_attributes, shaped
from cases import Case, integers, normal, parametrize
from epilogues import ACTIVATIONS, ADDENDS, channels_shape, conv, exact_sum
from jaxcudnn import _fusion, _load, _lowering, _plans, _spec
from jaxcudnn._activations import ACTIVATIONS as TABLE
from jaxcudnn._route_geometry import last
from tolerance import assert_close_activated

NHWC = cases.CHANNELS_LAST[2]
over_addends = pytest.mark.parametrize(
    "with_bias, with_residual", ADDENDS, ids=["none", "residual", "bias", "bias-residual"]
)


def addends(case: Case, with_bias=True, with_residual=True, draw=integers, dtype="float32"):
    return (
        draw(7, channels_shape(case), dtype) if with_bias else None,
        draw(8, case.y_shape, dtype) if with_residual else None,
    )


class TestValues:
    @parametrize()
    def test_every_case(self, case: Case):
        """In integers, and so exactly."""
        x, w = case.operands("y", integers)
        bias, residual = addends(case)
        exact, _ = oracle.compute("y", x, w, case)
        wanted = np.maximum(exact_sum(case, exact, bias, residual), 0)
        np.testing.assert_array_equal(jax.jit(conv(case))(x, w, bias, residual), wanted)

    @over_addends
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_every_epilogue(self, activation, with_bias, with_residual):
        (case,) = cases.named("2d-scrambled")
        x, w = case.operands("y")
        bias, residual = addends(case, with_bias, with_residual, normal)
        exact, magnitude = oracle.compute("y", x, w, case)
        absolute = [None if a is None else abs(a) for a in (bias, residual)]
        assert_close_activated(
            conv(case, activation)(x, w, bias, residual),
            ACTIVATIONS[activation],
            exact_sum(case, exact, bias, residual),
            exact_sum(case, magnitude, *absolute),
            dtype="float32",
            length=case.lengths["y"],
        )

    def test_the_names_are_these(self):
        assert set(TABLE) == set(ACTIVATIONS) - {None}

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_the_sum_is_rounded_once(self, dtype: str):
        """1 + eps / 4 - 1 is nothing if it is rounded in between."""
        eps = float(jnp.finfo(dtype).eps)
        x = jnp.ones((1, 1, 1), dtype)
        bias, residual = jnp.full(1, eps / 4, dtype), jnp.full((1, 1, 1), -1, dtype)
        y = jaxcudnn.conv_bias_act(x, x, bias, residual, padding="VALID")
        assert y.item() == eps / 4

    def test_activations_are_computed_in_float32(self):
        z = jnp.linspace(-4, 4, 257).astype("bfloat16").reshape(1, 1, -1)
        one = jnp.ones((1, 1, 1), z.dtype)
        for name in TABLE:
            y = jaxcudnn.conv_bias_act(z, one, activation=name, padding="VALID")
            wanted = TABLE[name].formula(z.astype("float32")).astype(z.dtype)
            np.testing.assert_array_equal(y, wanted, err_msg=name)

    def test_a_function_gets_the_rounded_sum(self):
        seen = []

        def activation(z):
            seen.append(z)
            return jnp.cos(z)

        (case,) = cases.named("2d-last")
        x, w = case.operands("y", dtype="bfloat16")
        bias, residual = addends(case, draw=normal, dtype="bfloat16")
        y = conv(case, activation)(x, w, bias, residual)
        (z,) = seen
        np.testing.assert_array_equal(z, conv(case, None)(x, w, bias, residual))
        np.testing.assert_array_equal(y, jnp.cos(z))

    def test_defaults(self):
        (case,) = cases.named("2d")
        x, w = case.operands("y")
        y = jaxcudnn.conv_bias_act(x, w, padding=case.padding)
        np.testing.assert_array_equal(y, jax.nn.relu(case.conv(x, w)))


class TestCalls:
    """Whatever `conv_general_dilated` takes is taken, and gives what it gives, act upon it."""

    def check(self, x, w, activation: str | None = "relu", **arguments):
        plain = {"window_strides": (1,) * (x.ndim - 2)} | arguments
        y = jaxcudnn.conv_general_dilated(x, w, **plain)
        numbers = plain.get("dimension_numbers")
        axis = numbers[2].index("C") if numbers else 1
        bias, residual = (
            integers(seed, shape, y.dtype.name)
            for seed, shape in ((1, (y.shape[axis],)), (2, y.shape))
        )
        got = jaxcudnn.conv_bias_act(x, w, bias, residual, activation, **arguments)
        spread = np.expand_dims(np.asarray(bias), tuple(i for i in range(y.ndim) if i != axis))
        z = np.asarray(y) + np.asarray(residual) + spread
        assert got.dtype == y.dtype
        np.testing.assert_array_equal(got, np.maximum(z, 0) if activation else z)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"padding": ((2, 1), (0, 2)), "lhs_dilation": (2, 3)},
            {"padding": ((-1, 1), (2, -2)), "lhs_dilation": (2, 3)},
            {"padding": ((2, 1), (0, 2)), "lhs_dilation": (2, 3), "window_strides": (3, 2)},
            {"padding": ((1, 1), (1, 1)), "lhs_dilation": (2, 2), "feature_group_count": 2},
            {"padding": ((1, 1), (1, 1)), "lhs_dilation": (2, 2), "batch_group_count": 2},
            {"padding": "SAME", "batch_group_count": 2, "window_strides": (2, 1)},
            {"padding": ((-2, 3), (1, -1)), "rhs_dilation": (2, 1)},
            {"padding": "SAME", "preferred_element_type": "float32"},
            {"padding": ((1, 0), (2, 2)), "dimension_numbers": ("HNCW", "OIHW", "CWNH"),
             "lhs_dilation": (1, 2)},
        ],
        ids=str,
    )  # fmt: skip
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_geometry(self, arguments, dtype: str):
        scrambled = "dimension_numbers" in arguments
        groups = arguments.get("feature_group_count", 1)
        x = integers(3, (6, 2, 4, 5) if scrambled else (2, 4, 6, 5), dtype)
        self.check(x, integers(4, (6, 4 // groups, 3, 2), dtype), **arguments)

    def test_filter_gradients(self):
        """A window as large as the image is read as wgrad."""
        x, w = integers(3, (40, 2, 3, 40)), integers(4, (40, 2, 3, 38))
        numbers = ("HNCW", "HOIW", "HNCW")
        x, w = integers(3, (40, 3, 2, 40)), integers(4, (38, 4, 2, 38))
        call = functools.partial(
            jaxcudnn.conv_bias_act, x, w, padding="VALID", dimension_numbers=numbers
        )
        assert "conv_wgrad" in str(jax.make_jaxpr(call)())
        self.check(x, w, padding="VALID", dimension_numbers=numbers)

    @pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
    @pytest.mark.parametrize("activation", ["relu", None])
    def test_integers(self, dtype: str, activation):
        x = jnp.arange(50, dtype=dtype).reshape(1, 2, 25)
        w = jnp.arange(12, dtype=dtype).reshape(2, 2, 3)
        self.check(x, w, activation, padding="SAME")

    def test_truth_values(self):
        x, w = jnp.zeros((1, 1, 3), bool), jnp.ones((1, 1, 1), bool)
        bias, residual = jnp.zeros(1, bool), jnp.array([[[True, False, True]]])
        y = jaxcudnn.conv_bias_act(x, w, bias, residual, None, padding="VALID")
        np.testing.assert_array_equal(y, residual)

    def test_complex(self):
        x, w = 1j * integers(3, (2, 2, 5)).astype("complex64"), integers(4, (3, 2, 3), "complex64")
        self.check(x, w, None, padding="SAME")

    def test_eight_bits(self):
        x, w = jnp.ones((1, 2, 5), "float8_e4m3fn"), jnp.ones((3, 2, 1), "float8_e4m3fn")
        self.check(x, w, padding="SAME")

    def test_float64(self):
        with jax.enable_x64(True):
            x, w = (jnp.asarray(normal(s, (2, 2, 5), "float32"), "float64") / 3 for s in (3, 4))
            bias = jnp.full(2, 1e-12)
            y = jaxcudnn.conv_bias_act(x, w, bias, activation=None, padding="SAME")
            y -= jaxcudnn.conv_general_dilated(x, w, (1,), "SAME")
            np.testing.assert_allclose(y, 1e-12, rtol=1e-3)

    def test_no_spatial_dimension(self):
        self.check(integers(3, (2, 4)), integers(4, (3, 4)), padding=())

    def test_numpy_arrays(self):
        x = np.ones((1, 1, 1), "float32")
        y = jaxcudnn.conv_bias_act(x, x, np.ones(1, "float32"), x, padding="VALID")
        assert y.item() == 3

    @pytest.mark.parametrize("explicit", ["x", "bias", "residual"])
    def test_explicit_sharding(self, explicit: str):
        (case,) = cases.named("2d-last")
        x, w = case.operands("y", integers)
        bias, residual = addends(case)
        arrays = {"x": x, "w": w, "bias": bias, "residual": residual}
        wanted = conv(case)(**arrays)
        mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(mesh):
            sharding = jax.NamedSharding(mesh, jax.P("d"))
            for name in ("x", "residual") if explicit == "x" else (explicit,):
                arrays[name] = jax.device_put(arrays[name], sharding)
            added = {name: arrays.pop(name) for name in ("bias", "residual")}
            gradient = jax.grad(lambda added: conv(case)(**arrays, **added).sum())(added)
            arrays |= added
            got = jax.jit(conv(case))(**arrays)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(gradient["residual"], wanted > 0)
        np.testing.assert_array_equal(gradient["bias"], (wanted > 0).sum((0, 1, 2)))

    def test_symbolic_number_of_images(self):
        x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 6, 7, 3"), np.dtype("float32"))
        w = shaped((3, 3, 3, 3), "float32")
        f = jax.jit(
            lambda x, w: jaxcudnn.conv_bias_act(
                x, w, residual=x, padding="SAME", dimension_numbers=NHWC
            )
        )
        exported = export.export(
            f, platforms=("cpu", "cuda"), disabled_checks=jaxcudnn.export_checks()
        )(x, w)
        arguments = integers(1, (2, 6, 7, 3)), integers(2, w.shape)
        np.testing.assert_array_equal(exported.call(*arguments), f(*arguments))


class TestTransposed:
    @pytest.mark.parametrize("transpose_kernel", [False, True])
    @pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 1)), ((0, -1), (-2, 3))])
    def test_is_conv_transpose_and_then_the_epilogue(self, padding, transpose_kernel: bool):
        x = integers(1, (2, 5, 4, 3))
        w = integers(2, (3, 2, 6, 3) if transpose_kernel else (3, 2, 3, 6))
        geometry: dict[str, Any] = {
            "strides": (2, 3), "padding": padding, "transpose_kernel": transpose_kernel
        }  # fmt: skip
        y = jaxcudnn.conv_transpose(x, w, **geometry)
        bias, residual = integers(3, (6,)), integers(4, y.shape)
        got = jaxcudnn.conv_transpose_bias_act(x, w, bias, residual, **geometry)
        wanted = np.maximum(np.asarray(y) + np.asarray(residual) + np.asarray(bias), 0)
        np.testing.assert_array_equal(got, wanted)

    def test_is_one_primitive_unless_it_crops(self):
        x, w = shaped((2, 5, 4, 3)), shaped((3, 2, 3, 6))

        def text(padding):
            f = functools.partial(jaxcudnn.conv_transpose_bias_act, strides=(2, 2), padding=padding)
            return str(jax.make_jaxpr(f)(x, w))

        assert "conv_bias_act[" in text("SAME") and "op=dgrad" in text("SAME")
        assert "conv_bias_act[" not in text(((4, 4), (4, 4)))

    def test_symbolic_sizes_are_left_to_lax(self):
        x = jax.ShapeDtypeStruct(export.symbolic_shape("2, b, 4, 3"), np.dtype("float32"))
        f = jax.jit(
            lambda x, w, b: jaxcudnn.conv_transpose_bias_act(
                x, w, b, strides=(2, 2), padding="SAME"
            )
        )
        w, bias = integers(1, (3, 2, 3, 6)), integers(2, (6,))
        exported = export.export(f, platforms=("cpu",))(x, w, bias)
        x = integers(1, (2, 5, 4, 3))
        np.testing.assert_array_equal(exported.call(x, w, bias), f(x, w, bias))


class TestBatching:
    CASE = cases.named("2d-scrambled")[0]

    def operands(self, axes, size: int):
        shapes = (
            self.CASE.x_shape, self.CASE.w_shape, channels_shape(self.CASE), self.CASE.y_shape
        )  # fmt: skip
        return [
            integers(seed, shape if axis is None else (*shape[:axis], size, *shape[axis:]))
            for seed, (shape, axis) in enumerate(zip(shapes, axes, strict=True))
        ]

    @pytest.mark.parametrize("axes", list(itertools.product((None, 0), repeat=4))[1:], ids=str)
    def test_every_combination(self, axes):
        self.check(axes, 3)

    @pytest.mark.parametrize("size", [0, 1])
    @pytest.mark.parametrize("axes", [(0, None, None, 0), (0, 0, 0, 0), (None, None, None, 0)])
    def test_of_few(self, axes, size: int):
        self.check(axes, size)

    def check(self, axes, size: int):
        arrays = self.operands(axes, size)
        f = conv(self.CASE)
        mapped = jax.jit(jax.vmap(f, axes))(*arrays)
        assert mapped.shape == (size, *self.CASE.y_shape)
        for i in range(size):
            picked = (a if axis is None else a[i] for a, axis in zip(arrays, axes, strict=True))
            np.testing.assert_array_equal(mapped[i], f(*picked))

    @pytest.mark.parametrize("axes", [(4, None, None, 3), (1, None, None, None)], ids=str)
    @pytest.mark.parametrize("activation", ["relu", "gelu"])
    def test_images_are_folded_and_stay_fused(self, axes, activation: str):
        arrays = self.operands(axes, 2)
        f = jax.vmap(conv(self.CASE, activation), axes)
        primitives = [eqn.primitive.name for eqn in jax.make_jaxpr(f)(*arrays).eqns]
        assert primitives.count("conv_bias_act") == 1
        moved = [
            a if axis is None else jnp.moveaxis(a, axis, 0)
            for a, axis in zip(arrays, axes, strict=True)
        ]
        axes0 = [None if axis is None else 0 for axis in axes]
        wanted = jax.vmap(lambda *a: conv(self.CASE, activation)(*a), axes0)(*moved)
        np.testing.assert_array_equal(f(*arrays), wanted)

    def test_one_convolution_serves_all_residuals(self):
        axes = (None, None, None, 0)
        text = str(jax.make_jaxpr(jax.vmap(conv(self.CASE), axes))(*self.operands(axes, 2)))
        assert "conv_fprop" in text
        assert f"x_shape=({self.CASE.n}," in text

    def test_transposed(self):
        x, w, residual = integers(0, (3, 2, 5, 3)), integers(1, (3, 3, 6)), integers(2, (2, 10, 6))
        f = functools.partial(jaxcudnn.conv_transpose_bias_act, strides=(2,), padding="SAME")
        mapped = jax.vmap(lambda x: f(x, w, residual=residual))(x)
        for i in range(3):
            np.testing.assert_array_equal(mapped[i], f(x[i], w, residual=residual))


def lowered(f, *arguments, platform="cuda") -> str:
    traced = jax.jit(lambda *arguments: f(*arguments)).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def calls(f, *arguments) -> list[str]:
    lines = lowered(f, *arguments).splitlines()
    return [line for line in lines if f"custom_call @{_load.TARGET}(" in line]


X, W, B = shaped((2, 9, 8, 16)), shaped((16, 3, 3, 16)), shaped((16,))


def conv_nhwc(activation: Any = "relu", **changes: Any):
    arguments = {"padding": "SAME", "dimension_numbers": NHWC} | changes
    return lambda x, w, bias=None, residual=None: jaxcudnn.conv_bias_act(
        x, w, bias, residual, activation, **arguments
    )


def epilogue_of(line: str) -> tuple[str, bool, bool]:
    found = parse_attributes(line)
    return found["activation"], found["bias"], found["residual"]


class TestWithoutAGpu:
    """Only what certainly has a precompiled plan is fused."""

    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch):
        monkeypatch.setattr(_load, "local_device", lambda: None)

    @pytest.mark.parametrize("activation", ["relu", None])
    @over_addends
    def test_what_is_fused(self, activation, with_bias, with_residual):
        arguments = X, W, B if with_bias else None, X if with_residual else None
        if arguments[2:] == (None, None) and activation is None:
            return
        (line,) = calls(conv_nhwc(activation), *arguments)
        # cuDNN's precompiled engines want a bias.
        assert epilogue_of(line) == (activation or "", True, with_residual)
        text = lowered(conv_nhwc(activation), *arguments)
        assert "stablehlo.add" not in text and "stablehlo.maximum" not in text
        zeros = [line for line in text.splitlines() if "broadcast_in_dim" in line]
        assert len(zeros) == (0 if with_bias else 1)

    def test_operands_and_their_order_in_memory(self):
        numbers = ("NCHW", "OIHW", "HWNC")
        residual = shaped((9, 8, 2, 16))
        (line,) = calls(
            conv_nhwc(dimension_numbers=numbers),
            shaped((2, 16, 9, 8)), shaped((16, 16, 3, 3)), B, residual,
        )  # fmt: skip
        assert "(%arg0, %arg1, %arg3, %arg2)" in line
        last, hwnc = (
            "dense<[1, 3, 2, 0]> : tensor<4xindex>",
            "dense<[3, 1, 0, 2]> : tensor<4xindex>",
        )
        layouts = line.partition("operand_layouts = [")[2].partition("]>,")[0]
        assert f"{last}, {last}, {hwnc}, dense<0> : tensor<1xindex>" in line, layouts

    def test_none_of_it_is_a_convolution(self):
        text = str(jax.make_jaxpr(conv_nhwc(None))(X, W))
        assert "conv_fprop" in text and "conv_bias_act" not in text

    @pytest.mark.parametrize("activation", sorted(set(TABLE) - {"relu"}))
    def test_other_activations_are_not(self, activation: str):
        text = lowered(conv_nhwc(activation), X, W, B, X)
        (line,) = calls(conv_nhwc(activation), X, W, B, X)
        assert epilogue_of(line) == ("", False, False)
        assert "stablehlo.add" in text

    def test_other_platforms_get_lax(self):
        text = lowered(conv_nhwc(), X, W, B, X, platform="cpu")
        assert "custom_call" not in text and "stablehlo.convolution" in text

    def test_what_is_too_large_is_cut_and_not_fused(self):
        x, w = shaped((3, 2**14, 2**14, 4)), shaped((4, 1, 1, 4))
        lines = calls(conv_nhwc(), x, w)
        assert [epilogue_of(line) for line in lines] == [("", False, False)] * 3

    def test_explain(self):
        def rows(f, *arguments):
            return list(jaxcudnn.explain(f)(*arguments))

        (row,) = rows(conv_nhwc(), X, W, B, X)
        assert (row.op, row.call, row.route) == ("fprop", "conv_bias_act", "cuDNN")
        assert (row.epilogue, row.unfused) == ("residual + bias + relu", "")
        assert row.shapes == (X.shape, W.shape)
        assert row.dtypes == ("bfloat16",) * 3
        assert "fprop + residual + bias + relu" in str(jaxcudnn.explain(conv_nhwc())(X, W, B, X))

        (row,) = rows(conv_nhwc("relu6"), X, W)
        assert row.epilogue == "relu6" and "slow" in row.unfused
        table = str(jaxcudnn.explain(conv_nhwc("relu6"))(X, W))
        assert f"relu6 left to XLA: {row.unfused}" in table and "fprop [1]" in table

        bias = shaped((6,))
        (row,) = rows(
            functools.partial(jaxcudnn.conv_transpose_bias_act, strides=(2, 2), padding="SAME"),
            shaped((2, 5, 4, 3)), shaped((3, 2, 3, 6)), bias,
        )  # fmt: skip
        assert (row.op, row.epilogue) == ("dgrad", "bias + relu")
        assert row.reading == "conv_transpose_bias_act read as dgrad"

        with jax.enable_x64(True):
            (row,) = rows(conv_nhwc(), *(shaped(a.shape, "int8") for a in (X, W, B)))
        assert (row.op, row.epilogue, row.route) == ("fprop", "", "lax")

    def test_of_what_is_left_to_lax_only_that_is_said(self, monkeypatch):
        monkeypatch.setattr(_lowering, "LARGEST", 15)
        found = jaxcudnn.explain(conv_nhwc())(X, W)
        reason = "cuDNN keeps numbers in 32 bits, and it has one of 16"
        assert (found[0].epilogue, found[0].reason) == ("relu", reason)
        assert "left to XLA" not in str(found)


def spec(dtype="bfloat16", c=64, k=64, groups=1, **options) -> _spec.ConvSpec:
    x, w = shaped((2, 9, 8, c), dtype), shaped((k, 3, 3, c // groups), dtype)
    f = conv_nhwc(feature_group_count=groups, options=options)
    with jax.enable_x64(True):
        (eqn,) = jax.make_jaxpr(f)(x, w).eqns
    return eqn.params["spec"]


RELU, PLAIN, GELU = (_spec.Epilogue(name, bias=True) for name in ("relu", "", "gelu"))
KERNEL = "cuDNN would compile a kernel at run time"
UNKNOWN = "without a GPU here"


BUDGET = "cuDNN would compile a kernel at run time, for which tuning_budget is less than 3000 ms"
LONG, SHORT = (
    {"tuning_budget": jaxcudnn.TuningBudget(milliseconds=milliseconds)}
    for milliseconds in (3000, 2999)
)


class TestRule:
    @pytest.mark.parametrize(
        "op, changes, epilogue, with_gpu, without",
        [
            ("fprop", {}, RELU, "", ""),
            ("fprop", {}, PLAIN, "", ""),
            ("fprop", {"dtype": "float16"}, RELU, "", ""),
            ("fprop", {"dtype": "float32", "c": 4, "k": 12}, RELU, "", ""),
            ("fprop", {"dtype": "float64"}, RELU, "cuDNN fuses", "cuDNN fuses"),
            ("fprop", {"c": 12}, RELU, "", UNKNOWN),
            ("fprop", {"k": 12}, RELU, "", UNKNOWN),
            ("fprop", {"groups": 4}, RELU, "", UNKNOWN),
            ("fprop", {"groups": 8}, RELU, "it has fewer than 16", "it has fewer than 16"),
            ("fprop", {"k": 32, "groups": 4}, RELU, "it has fewer than 16", "it has fewer"),
            ("fprop", {"groups": 64}, RELU, "it has fewer than 16", "it has fewer than 16"),
            ("fprop", {"c": 3, "k": 3}, RELU, "", UNKNOWN),
            ("fprop", LONG, GELU, "", UNKNOWN),
            ("dgrad", LONG, PLAIN, "", UNKNOWN),
            ("fprop", {"algorithm": "exhaustive"}, GELU, "", UNKNOWN),
            ("fprop", SHORT, GELU, BUDGET, BUDGET),
            ("dgrad", SHORT, PLAIN, BUDGET, BUDGET),
            ("fprop", {}, GELU, BUDGET, BUDGET),
            ("fprop", SHORT, RELU, "", ""),
            ("fprop", {"allow_runtime_compilation": False}, GELU, KERNEL, KERNEL),
            ("dgrad", {"allow_runtime_compilation": False}, RELU, KERNEL, KERNEL),
            ("fprop", {"allow_runtime_compilation": False}, RELU, "", ""),
            ("fprop", {}, _spec.Epilogue("relu6"), "cuDNN has only a slow", "cuDNN has only"),
            ("fprop", {"algorithm": "exhaustive"}, RELU, "", ""),
            ("fprop", {"algorithm": "eng5"}, RELU, "the options name", "the options name"),
            ("fprop", {"algorithm": {"dgrad": "eng5"}}, RELU, "", ""),
        ],
    )  # fmt: skip
    def test_reasons(self, op, changes, epilogue, with_gpu, without):
        for has_device, reason in ((True, with_gpu), (False, without)):
            found = _fusion.fused_form(op, spec(**changes), epilogue, has_device=has_device)
            assert found.startswith(reason) and bool(found) == bool(reason)

    @pytest.mark.parametrize(("k", "largest"), [(64, 64 * 9 * 64), (8, 2 * 9 * 8 * 64)])
    def test_no_array_may_be_too_large(self, monkeypatch, k, largest):
        """Of which the filter is one."""
        for limit, reason in ((largest, ""), (largest - 1, "an array is too large for one call")):
            monkeypatch.setattr(_lowering, "MOST_ELEMENTS", limit)
            found = _lowering._unfused("fprop", spec(k=k), last(2), RELU)
            assert found.startswith(reason) and bool(found) == bool(reason)

    def test_a_bias_is_added_where_precompiled_engines_want_one(self):
        epilogue = _spec.Epilogue("relu", residual=True)
        assert _fusion.completed("fprop", epilogue) == _spec.Epilogue("relu", True, True)
        assert _fusion.completed("dgrad", epilogue) == epilogue
        assert _fusion.completed("fprop", _spec.Epilogue("gelu")) == _spec.Epilogue("gelu")


class TestOnAMachineWithAGpu:
    """The device is asked for the plan; here something else answers for it."""

    @pytest.fixture(autouse=True)
    def asked(self, monkeypatch):
        asked = []
        self.refused = lambda attributes: False

        def workspace(attributes, device, *, is_last):
            assert is_last is not any(
                attributes[name] for name in ("activation", "bias", "residual")
            )
            asked.append(dict(attributes))
            return None if self.refused(attributes) else 100

        monkeypatch.setattr(_load, "local_device", lambda: 3)
        monkeypatch.setattr(_plans, "workspace", workspace)
        return asked

    @pytest.mark.parametrize("activation", sorted(set(TABLE) - {"relu6"}))
    def test_all_activations_are_asked_for(self, asked, activation: str):
        with jaxcudnn.options(**LONG):
            (line,) = calls(conv_nhwc(activation), X, W, B, X)
        assert [{"schema": _load.SCHEMA, **each} for each in asked] == [parse_attributes(line)]
        assert epilogue_of(line) == (activation, True, True)

    def test_workspace_has_room_for_copies_of_filter_and_bias(self, asked):
        """At once, as where both are slices of one vector."""
        filters, bias = shaped((1024, 3, 3, 16)), shaped((1024,))
        (line,) = calls(conv_nhwc(), X, filters, bias)
        (reserved,) = re.findall(r"tensor<(\d+)xui8>", line)
        room = (filters.size + bias.size) * 2
        assert 100 + room <= int(reserved) <= 100 + room + 3 * 256

    def test_transposed(self, asked):
        f = lambda x, w: jaxcudnn.conv_transpose_bias_act(  # noqa: E731
            x, w, strides=(2, 2), padding="SAME", dimension_numbers=NHWC
        )
        with jaxcudnn.options(**LONG):
            (line,) = calls(f, X, W)
        assert parse_attributes(line)["op"] == "dgrad"
        assert epilogue_of(line) == ("relu", False, False)

    def test_what_cudnn_refuses_is_computed_in_two(self, asked, monkeypatch):
        self.refused = lambda attributes: attributes["bias"]
        (line,) = calls(conv_nhwc(), X, W, B, X)
        assert [each["bias"] for each in asked] == [True, False]
        assert epilogue_of(line) == ("", False, False)
        monkeypatch.setattr(_plans, "known", lambda attributes, device: None)
        (row,) = jaxcudnn.explain(conv_nhwc())(X, W, B, X)
        assert row.route == "cuDNN"
        assert row.unfused == "cuDNN has no plan for both together that the options allow"

    def test_results_that_are_converted_are_not_fused(self, asked):
        operands = [shaped(a.shape, "float8_e4m3fn") for a in (X, W)]
        (line,) = calls(conv_nhwc(), *operands)
        assert epilogue_of(line) == ("", False, False)

    def test_wider_results_are(self, asked):
        bias = shaped(B.shape, "float32")
        (line,) = calls(conv_nhwc(preferred_element_type="float32"), X, W, bias)
        assert epilogue_of(line) == ("relu", True, False)
        assert parse_attributes(line)["dtype"] == "float32"


class TestWorkspace:
    """What has no plan together is computed in two, and nothing is said."""

    class Extension:
        UnsupportedError = type("UnsupportedError", (Exception,), {})
        ExhaustedError = type("ExhaustedError", (Exception,), {})
        InvalidError = NativeError = type("NativeError", (Exception,), {})

        def __init__(self, error: str):
            self.error = getattr(self, error)

        def known_plan(self, device, **attributes):
            raise self.error("none")

    @pytest.mark.parametrize("error", ["UnsupportedError", "ExhaustedError"])
    @pytest.mark.parametrize("name", ["activation", "bias", "residual"])
    def test_none(self, monkeypatch, error: str, name: str):
        extension = self.Extension(error)
        monkeypatch.setattr(_load, "cudnn", lambda: extension)
        monkeypatch.setattr(_load, "native", lambda: extension)
        attributes = {
            "algorithm": "heuristic", "deterministic": True, "activation": "", "bias": False,
            "residual": False, "op": "fprop", "x": [], "w": [],
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _plans.workspace(attributes | {name: "relu"}, 0, is_last=False) is None


def test_signature_is_that_of_the_convolution():
    """Every keyword of `conv_general_dilated` but out_sharding is passed on."""
    (case,) = cases.named("2d-grouped-strided")
    x, w = case.operands("y")
    (eqn,) = jax.make_jaxpr(
        lambda x, w: jaxcudnn.conv_bias_act(
            x, w, **case.arguments, precision="highest", options={"verify": False}
        )
    )(x, w).eqns
    spec = eqn.params["spec"]
    assert spec.precision == (lax.Precision.HIGHEST,) * 2
    assert not spec.options.verify
