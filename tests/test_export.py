# SPDX-License-Identifier: Apache-2.0
"""Programs that `jax.export` saves for CUDA: what is in them, and what may load them.

Here they are saved and compiled without a GPU; test_gpu_export.py runs them on one.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType

import aot
import jaxcudnn
import lowered
import saved
from aot import shaped
from cases import OPERANDS, Case, integers, named, parametrize
from jaxcudnn import _load, _lowering

NHWC = ("NHWC", "OHWI", "NHWC")
X, W = shaped((2, 9, 8, 16), "float32"), shaped((8, 3, 3, 16), "float32")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


def conv(x, w):
    return jaxcudnn.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def training(x, w):
    y, pullback = jax.vjp(conv, x, w)
    return y, *pullback(y)


def save(f, *arguments, platforms=("cuda",), checks=None) -> export.Exported:
    """Export, and read it as another process would."""
    # A new function each time, so that nothing is remembered from other tests.
    exported = export.export(
        jax.jit(lambda *given: f(*given)),
        platforms=platforms,
        disabled_checks=jaxcudnn.export_checks() if checks is None else checks,
    )(*arguments)
    return export.deserialize(exported.serialize())


def compiled(program: export.Exported, *arguments) -> aot.Program:
    aot.require_plugin()
    return aot.compile(program.call, *arguments)


def symbolic(like: jax.ShapeDtypeStruct, shape: str, scope=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), like.dtype)


class TestChecks:
    def test_one_is_needed(self):
        with pytest.raises(ValueError, match="custom calls") as error:
            save(training, X, W, checks=())
        assert _load.TARGET in str(error.value)

    def test_and_no_other(self):
        checks = jaxcudnn.export_checks()
        assert checks == [export.DisabledSafetyCheck.custom_call(_load.TARGET)]
        assert lowered.count(save(training, X, W).mlir_module()) == (3, 0)

    def test_the_list_is_the_callers(self):
        jaxcudnn.export_checks().clear()
        assert len(jaxcudnn.export_checks()) == 1


class TestPlatforms:
    def test_cuda(self):
        program = save(training, X, W)
        assert program.platforms == ("cuda",)
        assert compiled(program, X, W).operations == ["dgrad", "fprop", "wgrad"]

    def test_cpu_and_cuda(self):
        program = save(training, X, W, platforms=("cpu", "cuda"))
        assert lowered.count(program.mlir_module()) == (3, 3)
        operands = integers(1, X.shape), integers(2, W.shape)
        for got, wanted in zip(program.call(*operands), training(*operands), strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert compiled(program, X, W).operations == ["dgrad", "fprop", "wgrad"]

    def test_the_program_carries_the_workspace(self):
        """Which is all that a plan may need, wherever it is chosen."""
        (call,) = compiled(save(conv, X, W), X, W).calls
        assert call.attributes["workspace_limit"] == _lowering.WORKSPACE_BUDGET
        (reserved,) = re.findall(r"u8\[(\d+)\]", call.line.partition("custom-call(")[0])
        assert int(reserved) >= _lowering.WORKSPACE_BUDGET


class TestSchema:
    def test_is_the_extensions(self):
        assert _load.native().schema() == _load.SCHEMA

    def test_a_program_of_each_is_kept(self):
        names = [f"saved_by_schema_{schema}.bin" for schema in range(1, _load.SCHEMA + 1)]
        assert [path.name for path in saved.SAVED] == names

    @pytest.mark.parametrize("path", saved.SAVED, ids=lambda path: path.stem)
    def test_an_older_program_runs(self, path):
        program = export.deserialize(path.read_bytes())
        operands = saved.operands()
        for got, wanted in zip(program.call(*operands), saved.program(*operands), strict=True):
            np.testing.assert_array_equal(got, wanted)

    @pytest.mark.parametrize("path", saved.SAVED, ids=lambda path: path.stem)
    def test_an_older_program_compiles(self, path):
        program = export.deserialize(path.read_bytes())
        arguments = (shaped(a.shape, a.dtype) for a in saved.operands())
        calls = compiled(program, *arguments).calls
        assert sorted(call.attributes["op"] for call in calls) == [
            "dgrad",
            "fprop",
            "fprop",
            "wgrad",
        ]
        schemas = {call.attributes.get("schema", 1) for call in calls}
        assert schemas == {int(path.stem.rpartition("_")[2])}

    @pytest.mark.parametrize("schema", [0, _load.SCHEMA + 1, 99])
    def test_one_that_is_not_known(self, monkeypatch, schema):
        monkeypatch.setattr(_load, "SCHEMA", schema)
        program = save(conv, X, W)
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            compiled(program, X, W)
        monkeypatch.undo()
        assert str(error.value).startswith(
            f"FAILED_PRECONDITION: jaxcudnn (instantiate): the program was saved with schema "
            f"{schema} of jaxcudnn's custom call, and the jaxcudnn that loads it reads schemas 1 "
            f"to {_load.SCHEMA}; load it with the jaxcudnn that saved it, or a newer one"
        )


class TestSymbolicNumberOfImages:
    """One call of cuDNN, for as many images as there are when the program is compiled."""

    X = symbolic(X, "b, 9, 8, 16")

    @pytest.mark.parametrize("n", [1, 2, 33])
    def test_is_any_number(self, n):
        x = shaped((n, *X.shape[1:]), "float32")
        program = compiled(save(training, self.X, W), x, W)
        assert program.operations == ["dgrad", "fprop", "wgrad"]
        assert program.count("conditional") == program.count("convolution") == 0
        assert program.temporary_bytes < _lowering.WORKSPACE_BUDGET + (1 << 20)

    def test_also_runs_here(self):
        program = save(training, self.X, W, platforms=("cpu", "cuda"))
        for n in (1, 2, 5):
            operands = integers(n, (n, *X.shape[1:])), integers(2, W.shape)
            for got, wanted in zip(program.call(*operands), training(*operands), strict=True):
                np.testing.assert_array_equal(got, wanted)

    @parametrize(
        named("1d-strided-dilated", "2d-grouped-strided", "2d-scrambled", "3d-grouped-dilated")
    )
    @pytest.mark.parametrize("computed", OPERANDS)
    def test_of_any_convolution(self, case: Case, computed: str):
        scope = export.SymbolicScope()

        def with_b_images(role):
            sizes = [*map(str, case.shape(role))]
            if role != "w":
                sizes[case.axes(role)[0]] = "b"
            return symbolic(X, ", ".join(sizes), scope)

        given = map(with_b_images, OPERANDS[computed])
        program = compiled(
            save(case.cudnn(computed), *given),
            *(shaped(case.shape(role), "float32") for role in OPERANDS[computed]),
        )
        assert len(program.calls) == 1 and program.count("conditional") == 0
        (call,) = program.calls
        assert call.attributes["x"][0] == call.attributes["y"][0] == _lowering.ANY_NUMBER

    def test_and_of_batches_of_them(self):
        f = jax.vmap(conv, (0, None))
        x = shaped((3, *X.shape), "float32")
        program = compiled(save(f, symbolic(X, "3, b, 9, 8, 16"), W), x, W)
        assert program.operations == ["fprop"]
        program = compiled(save(f, symbolic(X, "b, 2, 9, 8, 16"), W), x, W)
        assert program.operations == ["fprop"]

    def test_with_an_epilogue(self):
        def f(x, w, bias):
            return jaxcudnn.conv_bias_act(
                x, w, bias, activation="relu", padding="SAME", dimension_numbers=NHWC
            )

        bias = shaped((8,), "float32")
        program = save(f, self.X, W, bias, platforms=("cpu", "cuda"))
        found = compiled(program, X, W, bias)
        (call,) = found.calls
        assert (call.attributes["activation"], call.attributes["bias"]) == ("relu", True)
        operands = integers(1, X.shape), integers(2, W.shape), integers(3, bias.shape)
        np.testing.assert_array_equal(program.call(*operands), f(*operands))

    def test_under_install(self):
        f = lambda x, w: lax.conv_general_dilated(  # noqa: E731
            x, w, (1, 1), "SAME", dimension_numbers=NHWC
        )
        gradients = jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))
        with jaxcudnn.installed():
            program = save(f, self.X, W)
            of_gradients = save(gradients, symbolic(X, "b, 9, 8, 16"), W)  # of a scope of its own
        found = compiled(program, X, W)
        assert (found.operations, found.text.count("__cudnn$conv")) == (["fprop"], 0)
        found = compiled(of_gradients, X, W)
        assert "dgrad" in found.operations

    def test_more_than_cudnn_can_be_given_at_once(self, monkeypatch):
        monkeypatch.setattr(_lowering, "MOST_ELEMENTS", 3 * 9 * 8 * 16)
        program = save(training, self.X, W)
        monkeypatch.undo()
        assert compiled(program, shaped((3, 9, 8, 16), "float32"), W).operations == [
            "dgrad", "fprop", "wgrad"
        ]  # fmt: skip
        found = compiled(program, shaped((4, 9, 8, 16), "float32"), W)
        assert (found.calls, found.text.count("__cudnn$conv")) == ([], 3)

    def test_none(self):
        program = save(lambda x, w: conv(x[1:], w), self.X, W, platforms=("cpu", "cuda"))
        assert compiled(program, X, W).operations == ["fprop"]
        assert compiled(program, shaped((1, 9, 8, 16), "float32"), W).calls == []
        assert program.call(jnp.ones((1, 9, 8, 16)), jnp.ones(W.shape)).shape == (0, 9, 8, 8)

    @pytest.mark.parametrize("algorithm", ["measure", "heuristic", "eng5"])
    def test_plans_are_chosen_as_the_options_say(self, algorithm):
        with jaxcudnn.options(algorithm=algorithm, workspace_limit=12345):
            (call,) = compiled(save(conv, self.X, W), X, W).calls
        assert call.attributes["algorithm"] == algorithm
        assert call.attributes["workspace_limit"] == 12345

    def test_on_a_machine_with_a_gpu_nothing_is_asked_of_it(self, monkeypatch):
        modules = []
        for device in (None, 0):
            monkeypatch.setattr(_load, "local_device", lambda device=device: device)
            monkeypatch.setattr(_load, "cudnn", lambda: pytest.fail("cuDNN was asked"))
            modules.append(save(training, self.X, W).mlir_module())
        assert modules[0] == modules[1]

    def test_other_symbolic_sizes_are_left_to_lax(self):
        x = symbolic(X, "b, h, 8, 16")
        module = export.export(jax.jit(conv), platforms=("cuda",))(x, W).mlir_module()
        assert lowered.count(module) == (0, 1)

    def test_plans_cannot_be_listed(self):
        (row,) = jaxcudnn.explain(conv)(self.X, W)
        assert (row.route, row.reason, row.plan) == ("cuDNN", "", "")
        assert row.spec
        with pytest.raises(RuntimeError, match=r"jaxcudnn\.plans: plans must be listed .* GPU"):
            jaxcudnn.plans(row.spec)


class TestMesh:
    """JAX itself refuses a program for another number of devices, and names both numbers."""

    def test_program_for_four_devices(self):
        mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))
        split, whole = jax.NamedSharding(mesh, jax.P("d")), jax.NamedSharding(mesh, jax.P())
        f = jax.shard_map(conv, mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P("d"))
        x = jax.ShapeDtypeStruct((8, *X.shape[1:]), X.dtype, sharding=split)
        w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=whole)
        program = save(f, x, w, platforms=("cpu", "cuda"))
        assert program.nr_devices == 4
        assert lowered.count(program.mlir_module()) == (1, 1)
        with pytest.raises(ValueError, match=r"for 4 devices and is called in a .* with 1 devices"):
            program.call(jnp.ones(x.shape), jnp.ones(w.shape))
