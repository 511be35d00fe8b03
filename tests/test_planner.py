# SPDX-License-Identifier: Apache-2.0
"""Real cuDNN graphs and plans, made for an H200 from its properties where there is none.

cuDNN's libraries are needed, but no driver. What such plans compute is for the GPU tests to say.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from aot import shaped
from cases import CUDNN_CASES, DTYPES, OPERANDS, named, parametrize
from jaxcudnn import Options, _fusion, _load, _lowering
from jaxcudnn._spec import Epilogue
from processes import run_python

# The properties as cuDNN 9.19 reports them, and what later releases ask for beside them.
PROPERTIES = json.dumps(
    {
        "memoryBusWidth": 6144,
        **json.loads((Path(__file__).parent / "data" / "h200_device_properties.json").read_text()),
    }
)

FULL_CASES = [c for c in CUDNN_CASES if 0 not in (*c.x_shape, *c.w_shape, *c.y_shape)]
OPERATIONS = ("fprop", "dgrad", "wgrad")
FULL_ALIGNMENT = 16

TENSOR_CORE = "CUDNN_NUMERICAL_NOTE_TENSOR_CORE"
INEXACT = {
    "CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS",
    "CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION",
    "CUDNN_NUMERICAL_NOTE_FFT",
    "CUDNN_NUMERICAL_NOTE_WINOGRAD",
    "CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4",
    "CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6",
    "CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13",
}


@pytest.fixture(name="native", scope="module")
def load_cudnn():
    _load.native()  # a build that does not load is a failure
    try:
        return _load.cudnn()
    except RuntimeError as error:
        pytest.skip(str(error))


def attributes_of(case, computed, dtype, **options):
    """What the lowering would put into the custom call."""
    operands = [shaped(case.shape(role), dtype) for role in OPERANDS[computed]]
    equations = jax.make_jaxpr(case.cudnn(computed, **options))(*operands).eqns
    (equation,) = (e for e in equations if e.primitive.name.startswith("conv_"))
    op = equation.primitive.name.removeprefix("conv_")
    return _lowering._attributes(op, equation.params["spec"])


def layer(op, x=(8, 64, 56, 56), w=(128, 64, 3, 3), padding=1, **changes):
    """The attributes of an ordinary layer with stride 1."""
    spatial = len(x) - 2
    out = [size + 2 * padding - window + 1 for size, window in zip(x[2:], w[2:], strict=True)]
    return {
        "op": op,
        "x": list(x),
        "w": list(w),
        "y": [x[0], w[0], *out],
        "stride": [1] * spatial,
        "pre_padding": [padding] * spatial,
        "post_padding": [padding] * spatial,
        "dilation": [1] * spatial,
        "flip": False,
        "dtype": "bfloat16",
        "allow_tf32": True,
        "channels_first": False,
        "activation": "",
        "residual": False,
        "bias": False,
        "workspace_limit": 1 << 30,
        **_lowering._options_of(Options(), op),
        **changes,
    }


def test_the_cudnn_in_use_is_known(native):
    assert native.cudnn_version() >= 90800
    assert Path(native.cudnn_path()).is_file()


class TestEveryConvolutionHasAPlan:
    @parametrize(FULL_CASES, dtypes=DTYPES)
    @pytest.mark.parametrize("computed", OPERANDS)
    def test_table(self, native, case, computed, dtype):
        attributes = attributes_of(case, computed, dtype)
        for alignment in (FULL_ALIGNMENT, np.dtype(attributes["dtype"]).itemsize):
            plan = native.plan_from_properties(PROPERTIES, **attributes, alignment=alignment)
            assert plan.name.startswith("eng")
            assert 0 <= plan.workspace_size <= attributes["workspace_limit"]
            assert INEXACT.isdisjoint(plan.notes)

    @parametrize(FULL_CASES)
    @pytest.mark.parametrize("computed", OPERANDS)
    def test_strict_float32(self, native, case, computed):
        attributes = attributes_of(case, computed, "float32", precision="highest")
        for alignment in (FULL_ALIGNMENT, 4):
            plan = native.plan_from_properties(PROPERTIES, **attributes, alignment=alignment)
            assert {TENSOR_CORE, *INEXACT}.isdisjoint(plan.notes)

    @parametrize(named("2d", "2d-dilated-strided", "2d-depthwise", "3d-grouped-dilated", "1d"))
    @pytest.mark.parametrize("computed", OPERANDS)
    def test_reversed_window(self, native, case, computed):
        attributes = attributes_of(case, computed, "float32", convolution_mode="CONVOLUTION")
        assert attributes["flip"]
        assert native.plan_from_properties(PROPERTIES, **attributes).name


class TestChoice:
    LAYERS = (
        {},
        {
            "x": (16, 64, 1, 4096),
            "w": (128, 64, 1, 3),
            "pre_padding": [0, 1],
            "post_padding": [0, 1],
        },
        {"x": (2, 32, 16, 16, 16), "w": (32, 32, 3, 3, 3)},
    )

    @staticmethod
    def plan(native, op, sizes, **changes):
        attributes = layer(op, **sizes, **changes)
        if attributes["x"][2] == 1:
            attributes["y"][2] = 1
        return native.plan_from_properties(PROPERTIES, **attributes)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("op", OPERATIONS)
    @pytest.mark.parametrize("sizes", LAYERS, ids=["2d", "1d", "3d"])
    def test_tensor_cores_are_used(self, native, sizes, op, dtype):
        assert TENSOR_CORE in self.plan(native, op, sizes, dtype=dtype).notes

    @pytest.mark.parametrize("op", OPERATIONS)
    @pytest.mark.parametrize("sizes", LAYERS, ids=["2d", "1d", "3d"])
    def test_but_not_where_tf32_is_forbidden(self, native, sizes, op):
        plan = self.plan(native, op, sizes, dtype="float32", allow_tf32=False)
        assert {TENSOR_CORE, *INEXACT}.isdisjoint(plan.notes)

    @pytest.mark.parametrize("op", OPERATIONS)
    def test_nothing_is_compiled_at_run_time(self, native, op):
        """That takes seconds, and is left for what no other engine can do."""
        notes = self.plan(native, op, {}).notes
        assert "CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION" not in notes

    @pytest.mark.parametrize("op", OPERATIONS)
    def test_the_same_request_gets_the_same_plan(self, native, op):
        first, second = (self.plan(native, op, {}) for _ in range(2))
        assert (first.name, first.workspace_size, first.notes) == (
            second.name, second.workspace_size, second.notes
        )  # fmt: skip


class TestWorkspaceLimit:
    @pytest.mark.parametrize("limit", [0, 1 << 20])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("op", OPERATIONS)
    def test_is_kept(self, native, op, dtype, limit):
        attributes = layer(op, dtype=dtype, allow_tf32=False, workspace_limit=limit)
        plan = native.plan_from_properties(PROPERTIES, **attributes)
        assert plan.workspace_size <= limit

    def test_changes_the_choice(self, native):
        attributes = layer("fprop", dtype="float32", allow_tf32=False)
        free = native.plan_from_properties(PROPERTIES, **attributes)
        assert free.workspace_size > 0
        attributes["workspace_limit"] = free.workspace_size - 1
        assert native.plan_from_properties(PROPERTIES, **attributes).name != free.name
        attributes["workspace_limit"] = free.workspace_size
        assert native.plan_from_properties(PROPERTIES, **attributes).name == free.name

    def test_that_nothing_meets(self, native):
        # cuDNN's generic engines need none, so no real limit is too small.
        with pytest.raises(
            native.NativeError,
            match=r"needs more workspace than the -1 bytes given; eng\S+ needs \d+ bytes\. "
            r"The convolution: op=fprop x=\(8,64,56,56\).*, operands aligned to 16 bytes",
        ) as error:
            native.plan_from_properties(PROPERTIES, **layer("fprop", workspace_limit=-1))
        assert not isinstance(error.value, native.UnsupportedError)


class TestPlansThatAreNotUsed:
    """csrc/known_faults.cc and the generic engine, seen from outside."""

    def test_engines_that_ignore_the_high_padding(self, native):
        symmetric = layer("wgrad", dtype="float32", allow_tf32=False)
        plan = native.plan_from_properties(PROPERTIES, **symmetric)
        assert plan.name.startswith("eng20_")  # else the next lines show nothing
        asymmetric = symmetric | {"post_padding": [0, 0], "y": [8, 128, 55, 55]}
        plan = native.plan_from_properties(PROPERTIES, **asymmetric)
        assert plan.name.split("_")[0] not in ("eng1", "eng20")

    def test_engine_that_rounds_partial_sums(self, native):
        depthwise = layer("wgrad", (8, 104, 64, 64), (104, 1, 3, 3), dtype="float32")
        plan = native.plan_from_properties(PROPERTIES, **depthwise)
        assert plan.name.startswith("eng61_")  # else the next lines show nothing
        plan = native.plan_from_properties(PROPERTIES, **depthwise | {"dtype": "float16"})
        assert plan.name.split("_")[0] != "eng61"

    @pytest.mark.parametrize("op", OPERATIONS)
    @pytest.mark.parametrize(("dtype", "alignment"), [("bfloat16", 2), ("float32", 4)])
    def test_small_alignment_gets_the_generic_engine(self, native, op, dtype, alignment):
        attributes = layer(op, dtype=dtype)
        plan = native.plan_from_properties(PROPERTIES, **attributes, alignment=alignment)
        assert plan.name == "eng0"

    @pytest.mark.parametrize("op", ["fprop", "dgrad"])
    @pytest.mark.parametrize("activation", ["", "relu", "gelu"])
    def test_with_an_epilogue_only_precompiled_engines_take_any_address(
        self, native, op, activation
    ):
        attributes = layer(op, activation=activation, residual=True, bias=True)
        if _fusion.takes_any_address(op, Epilogue(activation, bias=True, residual=True)):
            plan = native.plan_from_properties(PROPERTIES, **attributes, alignment=2)
            assert plan.name == "eng0"
        else:
            # Of engines that want a driver to compile for, it says CUDNN_STATUS_..._MISSING.
            with pytest.raises(native.UnsupportedError, match=r"CUDNN_STATUS_NOT_SUPPORTED$"):
                native.plan_from_properties(PROPERTIES, **attributes, alignment=2)


class TestCandidates:
    """Which are worth measuring."""

    MIB = 1 << 20

    def workspaces(self, native, **changes):
        attributes = {**changes, "algorithm": "measure", "dtype": "float32"}
        found = native.candidates_from_properties(PROPERTIES, **attributes)
        return {plan.name.split("_")[0]: plan.workspace_size for plan in found}

    def test_about_as_much_workspace_as_the_first(self, native):
        # Two fifths faster than the first on a GPU, and with a hundredth more workspace.
        x, w = (32, 3, 16, 64, 64), (64, 3, 3, 3, 3)
        found = self.workspaces(native, **layer("wgrad", x, w) | {"channels_first": True})
        assert next(iter(found)) == "eng30"
        assert max(found.values()) > 500 * self.MIB

    def test_several_times_the_arrays_where_channels_are_few(self, native):
        x, w = (16, 1, 1, 109_000), (1000, 1, 1, 10_000)
        strided = {"y": [16, 1000, 1, 100], "stride": [1, 1000]}
        found = self.workspaces(native, **layer("fprop", x, w, padding=0) | strided)
        assert 64 * self.MIB < max(found.values()) < 4 * 54 * 10**6

    def test_little_for_usual_ones(self, native):
        found = self.workspaces(native, **layer("wgrad", (256, 64, 56, 56), (64, 64, 3, 3)))
        assert max(found.values()) <= 64 * self.MIB


class TestRefusals:
    def test_what_cudnn_cannot_do_is_told_apart(self, native):
        big = 1 << 16
        attributes = layer("fprop", x=(1, big, 6, 6), w=(big, big, 3, 3))
        with pytest.raises(native.UnsupportedError, match="filter total elements exceed"):
            native.plan_from_properties(PROPERTIES, **attributes)
        assert issubclass(native.UnsupportedError, native.NativeError)

    def test_alignment_below_the_element(self, native):
        with pytest.raises(native.NativeError, match=r"building the cuDNN graph failed.*[Aa]lign"):
            native.plan_from_properties(PROPERTIES, **layer("fprop"), alignment=3)

    @pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}"])
    def test_properties(self, native, text):
        with pytest.raises(
            native.NativeError, match="reading the device properties given as JSON failed"
        ):
            native.plan_from_properties(text, **layer("fprop"))


class TestAttributes:
    """Refused before cuDNN is looked for."""

    @pytest.mark.parametrize("function", ["known_plan", "plan_from_properties"])
    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"op": "conv"}, "unknown operation 'conv'"),
            ({"dtype": "int3"}, "unknown dtype 'int3'"),
            ({"x": [8, 64, 56]}, "x, w and y must have two more dimensions than stride, got op="),
            ({"w": [128, 64, 3, 0]}, r"sizes must be positive, got .* w=\(128,64,3,0\)"),
            ({"y": [8, 128, 57, 56]}, "y must have the size that x, w, stride, padding and dil"),
            ({"stride": [1, 0]}, "stride and dilation must be positive"),
            ({"dilation": [1, -1]}, "stride and dilation must be positive"),
            ({"pre_padding": [-1, 0]}, "padding must not be negative"),
            ({"post_padding": [1]}, "padding and dilation must be as long as stride"),
            ({"w": [128, 48, 3, 3]}, "batch, channels and groups must agree"),
        ],
    )
    def test_values(self, function, changes, text):
        extension = _load.native()
        leading = [0] if function == "known_plan" else [PROPERTIES]
        with pytest.raises(extension.NativeError, match=text):
            getattr(extension, function)(*leading, **{**layer("fprop"), **changes})

    @pytest.mark.parametrize("name", layer("fprop"))
    def test_types(self, name):
        for changes in ({name: None}, {name: [[]]}):
            with pytest.raises(TypeError, match=f"'{name}' is missing or of the wrong type"):
                _load.native().known_plan(0, **{**layer("fprop"), **changes})

    def test_names(self):
        for name, attributes in (
            ("dtype", {n: v for n, v in layer("fprop").items() if n != "dtype"}),
            ("more", layer("fprop") | {"more": 1}),
        ):
            with pytest.raises(TypeError, match=f"'{name}'"):
                _load.native().known_plan(0, **attributes)


def test_without_a_gpu_planning_for_one_fails_and_is_not_remembered(native):
    first, second, counters = run_python(
        f"""
        from jaxcudnn import _load
        native = _load.cudnn()
        for _ in range(2):
            try:
                native.known_plan(0, **{layer("fprop", algorithm="heuristic")!r})
            except native.NativeError as error:
                print(error)
        info = native.cache_info()
        print(info.hits, info.misses, info.size)
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert first == second
    assert "CUDA" in first
    assert counters == "0 2 0"
