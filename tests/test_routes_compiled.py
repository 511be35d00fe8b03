# SPDX-License-Identifier: Apache-2.0
"""What XLA makes of routes for an H200: how many passes over the arrays, and by what."""

from dataclasses import replace
from functools import partial

import jax
import pytest

import aot
from aot import shaped
from jaxcudnn import Options, _load, _primitives, _routes
from jaxcudnn._dtypes import Dtypes
from jaxcudnn._route_geometry import last
from jaxcudnn._spec import ROLES, ConvSpec

OPS = tuple(ROLES)
EMBEDDING = ((64, 3, 224, 224), (768, 3, 16, 16), (16, 16), (0, 0), 1)
DOUBLING = ((8, 64, 256, 256), (128, 64, 2, 2), (2, 2), (0, 0), 1)
STEM = ((128, 3, 224, 224), (64, 3, 7, 7), (2, 2), (3, 3), 1)
CAUSAL = ((16, 512, 16384), (512, 1, 4), (1,), (3, 0), 512)
LARGE = ((64, 384, 32, 32), (384, 1, 31, 31), (1, 1), (15, 15), 384)
FREE = {"parameter", "bitcast", "constant", "get-tuple-element", "tuple"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    aot.require_plugin()
    monkeypatch.setattr(_load, "local_device", lambda: None)


def described(sizes: tuple, dtype: str = "bfloat16") -> ConvSpec:
    x_shape, w_shape, strides, pads, groups = sizes
    return ConvSpec(
        x_shape=x_shape,
        w_shape=w_shape,
        strides=strides,
        padding=(pads,) * len(strides),
        dilation=(1,) * len(strides),
        groups=groups,
        flip=False,
        dtypes=Dtypes(dtype, dtype, dtype),
        precision=(jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT),
        options=Options(routes=("matmul", "space_to_depth", "blocks", "shifts", "toeplitz", "fft")),
    )


def primitive(a, b, *, op, spec, layout):
    first, second, _ = ROLES[op]
    return _primitives.compute({first: a, second: b}, spec=spec, layout=layout)


def compiled(name: str, op: str, spec: ConvSpec) -> aot.Program:
    layout = last(spec.num_spatial)
    route = partial(
        _routes.KINDS[name].compute, op=op, spec=spec, layout=layout, convolve=primitive
    )
    operands = [
        shaped(layout.to_array(role, spec.shape(role)), spec.dtype(role)) for role in ROLES[op][:2]
    ]
    return aot.compile(route, *operands)


def kernels(program: aot.Program) -> list[str]:
    """What runs one after another: whether it moves data, computes, or calls cuDNN."""
    moves = {move.name for move in program.moves}
    found = []
    for each in program.entry:
        inside = {i.opcode for i in program.instructions if i.computation == each.calls}
        if each.opcode in FREE:
            continue
        if each.opcode == "custom-call":
            found.append("cuDNN" if each in program.calls else "cuBLAS")
        elif "dot" in inside:
            found.append("dot")
        elif "reduce" in inside:
            found.append("reduce")
        else:
            found.append("move" if each.name in moves else "loop")
    return found


@pytest.mark.parametrize("sizes", [EMBEDDING, DOUBLING], ids=["embedding", "doubling"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
class TestMatmul:
    """The image is copied once, and the filter never."""

    def test_forward(self, sizes, dtype):
        assert kernels(compiled("matmul", "fprop", described(sizes, dtype))) == ["move", "dot"]

    def test_gradient_of_the_image(self, sizes, dtype):
        assert kernels(compiled("matmul", "dgrad", described(sizes, dtype))) == ["dot", "move"]

    def test_gradient_of_the_filter(self, sizes, dtype):
        """A long sum is divided among products whose partial sums are in float32."""
        program = compiled("matmul", "wgrad", described(sizes, dtype))
        assert kernels(program) in (["move", "dot"], ["move", "dot", "reduce"])

    @pytest.mark.parametrize("op", ["fprop", "dgrad"])
    def test_sums_are_rounded_by_the_kernel_that_makes_them(self, sizes, dtype, op):
        program = compiled("matmul", op, described(sizes, dtype))
        (dot,) = (i for i in program.instructions if i.opcode == "dot")
        assert " f32[" in dot.line.partition(" dot(")[0]
        (kernel,) = (i for i in program.entry if i.calls == dot.computation)
        assert f" {'bf16' if dtype == 'bfloat16' else 'f32'}[" in kernel.line


@pytest.mark.parametrize("op", OPS)
def test_patches_of_whole_channels_are_multiplied_as_they_are(op):
    spec = described(((32, 64, 56, 56), (256, 64, 1, 1), (1, 1), (0, 0), 1))
    found = kernels(compiled("matmul", op, spec))
    assert [kind for kind in found if kind != "reduce"] == ["dot"]


class TestSpaceToDepth:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("op", OPS)
    def test_one_copy_of_the_image_and_one_of_the_filter(self, op, dtype):
        program = compiled("space_to_depth", op, described(STEM, dtype))
        assert (
            kernels(program)
            == {
                "fprop": ["move", "move", "cuDNN"],
                "dgrad": ["move", "cuDNN", "move"],
                "wgrad": ["move", "cuDNN", "move"],
            }[op]
        )
        (call,) = program.calls
        channels = 16 if dtype == "bfloat16" else 12
        assert call.attributes["op"] == op
        assert list(call.attributes["x"]) == [128, channels, 112, 112]
        assert list(call.attributes["w"]) == [64, channels, 4, 4]
        assert list(call.attributes["stride"]) == [1, 1]


class TestShifts:
    @pytest.mark.parametrize("op", ["fprop", "dgrad"])
    def test_one_loop(self, op):
        program = compiled("shifts", op, described(CAUSAL))
        assert len(kernels(program)) == 1 and program.temporary_bytes == 0

    def test_gradient_of_the_filter_reads_its_operands_once(self):
        """The second reduction is of the first one's partial sums."""
        program = compiled("shifts", "wgrad", described(CAUSAL))
        assert kernels(program) == ["reduce", "reduce"]
        parameters = {i.name for i in program.entry if i.opcode == "parameter"}
        readers = [i for i in program.entry if parameters.intersection(i.operands)]
        assert len(readers) == 1
        assert program.temporary_bytes <= 8 << 20


class TestToeplitz:
    @pytest.mark.parametrize("op", OPS)
    def test_copies_around_one_call(self, op):
        program = compiled("toeplitz", op, described(LARGE))
        (call,) = program.calls
        assert call.attributes["op"] == ("fprop" if op == "dgrad" else op)
        found = kernels(program)
        assert len(found) == 4 and found[2] == "cuDNN"
        assert list(call.attributes["x"])[:2] == [64, 384 * 32]
        assert list(call.attributes["w"])[:2] == [384 * 32, 32]


@pytest.mark.parametrize("op", OPS)
def test_fft_compiles(op):
    program = compiled("fft", op, replace(described(LARGE), x_shape=(4, 384, 32, 32)))
    assert program.count("fft") == 3
