# SPDX-License-Identifier: Apache-2.0
"""Which calls `install` leaves to XLA, and how: programs for several devices among them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcudnn
import lowered
from aot import shaped
from jaxcudnn import _install, _load, _lowering, _plans, _taps
from lowered import convolutions
from processes import run_python

X, W = shaped((4, 6, 9, 8), "float32"), shaped((6, 6, 3, 3), "float32")
ONE_OF_OURS, ONE_OF_XLAS = (1, 0), (0, 1)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)
    _install._warn_of_division.cache_clear()


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def loss(x, w):
    return jnp.sum(jnp.abs(conv(x, w)) ** 2).real


def gradient(x, w):
    return jax.grad(loss, argnums=(0, 1))(x, w)


PROGRAM = """
import jax
import jax.numpy as jnp
from jax import lax

def loss(x, w):
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME")
    y = jax.jit(conv)(conv(x, w), w)
    return jnp.sum(jnp.abs(lax.scan(lambda y, _: (conv(y, w), None), y, length=2)[0]) ** 2)

for dtype in ("float32", "complex64"):
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, 6, 9, 8), (6, 6, 3, 3)))
    traced = jax.jit(jax.grad(loss)).trace(x, w)
    for platform in ("cpu", "cuda"):
        print(traced.lower(lowering_platforms=(platform,)).as_text())
"""


class TestOutside:
    def test_programs_are_those_of_jax_alone(self):
        """Nor does importing this package change them."""
        assert run_python("import jaxcudnn\n" + PROGRAM) == run_python(PROGRAM)

    def test_other_platforms(self):
        expected = lowered.text(gradient, X, W, platforms=("cpu",))
        with jaxcudnn.installed():
            assert lowered.text(gradient, X, W, platforms=("cpu",)) == expected
            assert convolutions(gradient, X, W) == (3, 0)

    def test_a_program_for_two_platforms(self):
        checks = jaxcudnn.export_checks()
        with jaxcudnn.installed():
            exported = export.export(
                jax.jit(gradient), platforms=("cpu", "cuda"), disabled_checks=checks
            )(X, W)
        assert lowered.count(exported.mlir_module()) == (3, 3)


def refusing(call: Mapping[str, Any], device: int, **_: Any) -> int | None:
    return None if call["op"] == "dgrad" else 0


class TestLeftToXla:
    def test_what_cudnn_has_no_plan_for(self, monkeypatch):
        """As it is written, and not as the fall-back of another reading."""
        strided = lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "VALID")  # noqa: E731
        f = jax.grad(lambda x, w: jnp.sum(strided(x, w) ** 2))
        expected = lowered.text(f, X, W)
        with jaxcudnn.installed():
            assert convolutions(f, X, W) == (2, 0)
            monkeypatch.setattr(_load, "local_device", lambda: 0)
            monkeypatch.setattr(_plans, "workspace", refusing)
            assert convolutions(f, X, W) == (1, 1)
            monkeypatch.setattr(_plans, "workspace", lambda call, device, **rest: None)
            assert lowered.text(f, X, W) == expected

    @pytest.mark.parametrize("everything", [True, False])
    def test_what_our_own_functions_leave_to_lax(self, monkeypatch, everything: bool):
        """It does not come back to be asked for again, as another operation that has a plan."""
        monkeypatch.setattr(_load, "local_device", lambda: 0)
        monkeypatch.setattr(
            _plans,
            "workspace",
            lambda call, device, **rest: None if everything else refusing(call, device),
        )

        def f(dy, w):
            return jaxcudnn.conv_dgrad(dy, w, (9, 8), padding=1)

        # In 16 bits, since our own function would try a forward convolution in TF32.
        dy, w = shaped(X.shape, "bfloat16"), shaped(W.shape, "bfloat16")
        with jaxcudnn.installed():
            assert convolutions(f, dy, w) == ONE_OF_XLAS
            assert convolutions(lambda dy, w: jaxcudnn.installed()(f)(dy, w), dy, w) == ONE_OF_XLAS

    def test_symbolic_sizes(self):
        x = jax.ShapeDtypeStruct(export.symbolic_shape("2, 6, h, 8"), X.dtype)
        with jaxcudnn.installed():
            module = export.export(jax.jit(conv), platforms=("cuda",))(x, W).mlir_module()
        assert lowered.count(module) == ONE_OF_XLAS

    def test_a_complex_call_is_left_as_a_whole(self):
        x, w = shaped(X.shape, "complex64"), shaped(W.shape, "complex64")
        with jaxcudnn.installed(exclude=lambda call: call.dtype == "complex64"):
            assert convolutions(conv, x, w) == (0, 3)
        with jaxcudnn.installed():
            assert convolutions(gradient, x, w) == (9, 0)

    @pytest.mark.parametrize("first", ["complex", "real"])
    def test_an_equal_call_beside_what_is_left(self, first: str):
        """JAX lowers equal equations of a program once, if they are not kept apart."""
        x, w = shaped(X.shape, "complex64"), shaped(W.shape, "complex64")

        def f(x, w):
            real = conv(x.real, w.real) if first == "real" else None
            both = conv(x, w)
            return both, conv(x.real, w.real) if real is None else real

        with jaxcudnn.installed(exclude=lambda call: call.dtype == "complex64"):
            assert convolutions(f, x, w) == (1, 3)

    def test_integers_are_sums_of_matrix_products(self):
        """XLA has no kernel for them, to which they could be left."""
        x, w = shaped(X.shape, "int8"), shaped(W.shape, "int8")
        with jaxcudnn.installed():
            text = lowered.text(conv, x, w)
        assert lowered.count(text) == (0, 0)
        assert "stablehlo.dot_general" in text

    def test_operands_in_8_bits_are_taken(self):
        """By conversion to a dtype that cuDNN has."""
        x, w = shaped(X.shape, "float8_e4m3fn"), shaped(W.shape, "float8_e4m3fn")
        with jaxcudnn.installed():
            assert convolutions(conv, x, w) == ONE_OF_OURS


def over_devices(f, mesh: AbstractMesh):
    """Have XLA divide images among the devices of a mesh."""
    images, whole = NamedSharding(mesh, P("devices")), NamedSharding(mesh, P())
    return jax.jit(f, in_shardings=(images, whole))


class TestSeveralDevices:
    def test_automatic_division_is_left_to_xla_with_one_warning(self):
        mesh = AbstractMesh((4,), ("devices",), axis_types=(AxisType.Auto,))
        expected = lowered.text(over_devices(gradient, mesh), X, W)
        text = r"inside jax.shard_map, .* to be cuDNN's; got one outside, and left it to XLA"
        with jaxcudnn.installed(), pytest.warns(RuntimeWarning, match=text) as warned:
            found = lowered.text(over_devices(gradient, mesh), X, W)
        assert len(warned) == 1
        assert found == expected
        with jaxcudnn.installed():
            assert convolutions(over_devices(loss, mesh), X, W) == ONE_OF_XLAS

    def test_one_device_has_nothing_to_divide(self):
        mesh = AbstractMesh((1,), ("devices",), axis_types=(AxisType.Auto,))
        with jaxcudnn.installed():
            assert convolutions(over_devices(gradient, mesh), X, W) == (3, 0)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_in_shard_map(self, check_vma: bool):
        mesh = AbstractMesh((2,), ("devices",), axis_types=(AxisType.Auto,))
        f = jax.shard_map(
            gradient,
            mesh=mesh,
            in_specs=(P("devices"), P()),
            out_specs=(P("devices"), P()),
            check_vma=check_vma,
        )
        with jaxcudnn.installed():
            assert convolutions(f, X, W) == (3, 0)

    @pytest.mark.parametrize(("sizes", "expected"), [((2, 2), (0, 1)), ((2, 1), (1, 0))])
    @pytest.mark.filterwarnings("ignore:jaxcudnn.install. in a program:RuntimeWarning")
    def test_in_shard_map_over_some_axes(self, sizes: tuple[int, int], expected):
        mesh = AbstractMesh(sizes, ("devices", "others"), axis_types=(AxisType.Auto,) * 2)
        f = jax.shard_map(
            conv,
            mesh=mesh,
            in_specs=(P("devices"), P()),
            out_specs=P("devices"),
            axis_names={"devices"},
        )
        with jaxcudnn.installed():
            assert convolutions(f, X, W) == expected

    def test_in_two_shard_maps(self):
        mesh = AbstractMesh((2, 2), ("devices", "others"), axis_types=(AxisType.Auto,) * 2)
        specs = {"in_specs": (P(), P()), "out_specs": P()}
        inner = lambda x, w: jax.shard_map(conv, axis_names={"others"}, **specs)(x, w)  # noqa: E731
        f = jax.shard_map(inner, mesh=mesh, axis_names={"devices"}, **specs)
        with jaxcudnn.installed():
            assert convolutions(f, X, W) == ONE_OF_OURS

    def test_explicit_sharding_is_laxs(self):
        """Also with one device, for which nothing would have to be divided."""
        mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Explicit,))
        x, w = (
            jax.device_put(jnp.ones(a.shape), NamedSharding(mesh, spec))
            for a, spec in ((X, P("devices")), (W, P()))
        )
        with jax.set_mesh(mesh), jaxcudnn.installed():
            assert convolutions(conv, x, w) == ONE_OF_XLAS
            assert convolutions(conv, w, w) == ONE_OF_OURS


def network(x, w):
    x = lax.conv_general_dilated(x, w, (1, 1), "SAME")
    with jaxcudnn.installed(False):
        x = lax.conv_general_dilated(x, w, (1, 1), "SAME")
    return jnp.sum(lax.conv_general_dilated(x, w, (2, 2), "VALID") ** 2)


class TestExplain:
    def rows(self, f, *arguments):
        return [(row.op, row.reason) for row in jaxcudnn.explain(f)(*arguments)]

    def test_what_is_installed_is_listed(self):
        written = "it is written with jax.lax"
        assert self.rows(network, X, W) == [("lax", written)] * 3
        with jaxcudnn.installed():
            assert self.rows(network, X, W) == [("fprop", ""), ("lax", written), ("fprop", "")]
        with jaxcudnn.installed(exclude=lambda call: call.window_strides == (1, 1)):
            assert self.rows(network, X, W) == [
                ("lax", "it is excluded from what jaxcudnn.install reaches"),
                ("lax", written),
                ("fprop", ""),
            ]

    def test_gradients(self):
        def strided(x, w):
            return jnp.sum(lax.conv_general_dilated(x, w, (3, 3), "VALID"))

        x = shaped((4, 6, 33, 33), "float32")
        with jaxcudnn.installed():
            explanation = jaxcudnn.explain(jax.grad(strided, argnums=(0, 1)))(x, W)
        assert sorted(row.reading for row in explanation) == [
            "dgrad in the backward pass of lax.conv_general_dilated",
            "wgrad in the backward pass of lax.conv_general_dilated",
        ]
        assert all(row.route == "cuDNN" and row.backward for row in explanation)
        assert {row.spec.w_shape for row in explanation if row.spec} == {W.shape}

    def test_three_real_ones_for_a_complex_one(self):
        x, w = shaped(X.shape, "complex64"), shaped(W.shape, "complex64")
        with jaxcudnn.installed():
            (row,) = jaxcudnn.explain(conv)(x, w)
        assert (row.op, row.count) == ("fprop", 3)

    def test_what_cannot_be_taken(self, monkeypatch):
        monkeypatch.setattr(_taps, "MOST_SPATIAL", 1)
        with jaxcudnn.installed():
            (row,) = jaxcudnn.explain(conv)(X, W)
        assert (row.op, row.route) == ("fprop", "lax")
        monkeypatch.setattr(_taps, "MOST_SPATIAL", 3)
        monkeypatch.setattr(_lowering, "LARGEST", 8)
        with jaxcudnn.installed():
            (row,) = jaxcudnn.explain(conv)(X, W)
        assert row.op == "lax"
        assert row.reason == "cuDNN keeps numbers in 32 bits, and it has one of 11"

    def test_our_own_calls_keep_their_names(self):
        def f(x, w):
            return jaxcudnn.conv(x, w, (1, 1), "SAME")

        with jaxcudnn.installed():
            (row,) = jaxcudnn.explain(f)(X, W)
        assert row.call == "conv"


def test_values_do_not_change_here():
    x, w = jnp.asarray(np.arange(4 * 6 * 9 * 8.0).reshape(X.shape), "float32"), jnp.ones(W.shape)
    expected = conv(x, w)
    with jaxcudnn.installed():
        np.testing.assert_array_equal(conv(x, w), expected)
