# SPDX-License-Identifier: Apache-2.0
"""Tests under `jax.shard_map`, which `test_shard_map.py` runs in a process with four CPU devices.

Here a missing cast or sum raises nothing: gradients come out wrong by what other devices hold.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cases
import jaxcudnn
from cases import CHANNELS_LAST, OPERANDS, Case, integers, parametrize
from epilogues import conv

CASES = [
    cases.case("plain", (5, 6), (3, 2), "SAME", n=8, dimension_numbers=CHANNELS_LAST[2]),
    cases.case(
        "grouped", (5, 6), (3, 2), ((1, 0), (2, 1)), n=4, c=4, k=6, groups=2, strides=(2, 1)
    ),
]


def mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    assert len(jax.devices()) == 4
    return jax.make_mesh((4,), ("devices",), axis_types=(axis_type,))


def by_images(case: Case, role: str) -> P:
    """Divide x and y between devices by images, and give each device all of w."""
    return P() if role == "w" else P(*[None] * case.axes(role)[0], "devices")


def mapped(function, case: Case, computed: str, check_vma: bool = True):
    return jax.shard_map(
        function,
        mesh=mesh(AxisType.Auto),
        in_specs=tuple(by_images(case, role) for role in OPERANDS[computed]),
        out_specs=by_images(case, computed),
        check_vma=check_vma,
    )


def assert_equal(ours, theirs) -> None:
    """The operands are integers, so that sums in any order are equal."""
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("check_vma", [True, False])
@parametrize(CASES)
def test_derivatives_of_a_mapped_convolution(case: Case, check_vma: bool):
    def gradients(conv):
        return jax.jit(jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), argnums=(0, 1)))

    def tangents(conv):
        return jax.jit(lambda x, w: jax.jvp(conv, (x, w), (2 * x, 3 * w)))

    x, w = case.operands("y", integers)
    conv = mapped(case.conv, case, "y", check_vma)
    assert_equal(gradients(conv)(x, w), gradients(case.lax_conv)(x, w))
    assert_equal(tangents(conv)(x, w), tangents(case.lax_conv)(x, w))


@parametrize(CASES)
def test_gradient_inside_the_map(case: Case):
    """The gradient by what all devices share is a sum over devices, which nobody wrote."""

    def gradient(conv):
        return jax.grad(lambda x, w: jnp.sum(conv(x, w) ** 2), argnums=1)

    x, w = case.operands("y", integers)
    ours = jax.shard_map(
        gradient(case.conv),
        mesh=mesh(AxisType.Auto),
        in_specs=(by_images(case, "x"), P()),
        out_specs=P(),
    )
    assert_equal(jax.jit(ours)(x, w), gradient(case.lax_conv)(x, w))


@pytest.mark.parametrize("computed", ["y", "x"])
@parametrize(CASES)
def test_second_order(case: Case, computed: str):
    """Transposes of transposes, where each operation meets what varies and what is shared."""

    def second_order(function):
        first = jax.grad(lambda a, b: jnp.sum(function(a, b) ** 2), argnums=1)
        return jax.jit(jax.grad(lambda a, b: jnp.sum(first(a, b)), argnums=(0, 1)))

    operands = case.operands(computed, integers)
    function = case.cudnn(computed)
    assert_equal(
        second_order(mapped(function, case, computed))(*operands), second_order(function)(*operands)
    )


@parametrize(CASES)
def test_vmap_in_a_map(case: Case):
    x, w = case.operands("y", integers)
    ws = jnp.stack([w, 2 * w, 3 * w])
    ours = jax.shard_map(
        lambda x, ws: jax.vmap(case.conv, (None, 0))(x, ws),
        mesh=mesh(AxisType.Auto),
        in_specs=(by_images(case, "x"), P()),
        out_specs=P(None, *by_images(case, "y")),
    )
    assert_equal(jax.jit(ours)(x, ws), jax.vmap(case.lax_conv, (None, 0))(x, ws))


def test_a_replicated_tangent_varies_as_what_it_multiplies():
    """Or sums that differ between devices would pass for one replicated sum."""
    case = CASES[0]
    x, w = case.operands("y", integers)

    def tangent(x, w, x_tangent):
        return jnp.sum(jax.jvp(lambda x: case.conv(x, w), (x,), (x_tangent,))[1])

    def over_devices(out_specs: P):
        stacked = P("devices")
        return jax.shard_map(
            lambda x, w, t: tangent(x[0], w[0], t)[None],
            mesh=mesh(AxisType.Auto),
            in_specs=(stacked, stacked, P()),
            out_specs=out_specs,
        )

    arrays = jnp.stack([x] * 4), jnp.stack([w, 2 * w, 3 * w, 4 * w]), x
    with pytest.raises(ValueError, match=r"varying|replicated|out_specs"):
        over_devices(P())(*arrays)
    expected = jnp.sum(case.conv(x, w)) * jnp.arange(1, 5, dtype="float32")
    np.testing.assert_array_equal(over_devices(P("devices"))(*arrays), expected)


@pytest.mark.parametrize(
    "size, window, geometry",
    [
        (0, 3, {"padding": [(1, 1)], "window_strides": (1,)}),
        (5, 2, {"padding": [(1, 1)], "window_strides": (2,), "lhs_dilation": (2,),
                "rhs_dilation": (2,)}),
    ],
    ids=["nothing to sum", "nothing that meets"],
)  # fmt: skip
def test_zeros_vary_as_what_is_computed_does(size, window, geometry):
    def conv(x, w):
        y = jaxcudnn.conv_general_dilated(x, w, **geometry)
        assert jax.typeof(y).manual_axis_type.varying == {"devices"}
        return y

    ours = jax.shard_map(
        conv, mesh=mesh(AxisType.Auto), in_specs=(P("devices"), P()), out_specs=P("devices")
    )
    y = jax.jit(ours)(jnp.ones((4, 2, size)), jnp.ones((3, 2, window)))
    np.testing.assert_array_equal(y, jnp.zeros_like(y))


def test_vmap_over_none_varies_as_its_operands_do():
    (case, _) = CASES
    x, w = case.operands("y", integers)

    def conv(x, ws):
        y = jax.vmap(case.conv, (None, 0))(x, ws)
        assert jax.typeof(y).manual_axis_type.varying == {"devices"}
        return y

    ours = jax.shard_map(
        conv,
        mesh=mesh(AxisType.Auto),
        in_specs=(by_images(case, "x"), P()),
        out_specs=P(None, *by_images(case, "y")),
    )
    assert jax.jit(ours)(x, jnp.stack([w])[:0]).shape == (0, *case.y_shape)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("check_vma", [True, False])
@parametrize(CASES)
def test_an_epilogue_in_a_map(case: Case, check_vma: bool, activation: str):
    """Its bias is shared by all devices. Of gelu too, sums are of few numbers and nearly exact."""
    specs = [by_images(case, "x"), P(), P(), by_images(case, "y")]

    def derivatives(f):
        def loss(*arrays):
            return jnp.sum(f(*arrays) ** 2)

        def derive(*arrays):
            by_all = jax.grad(loss, argnums=(0, 1, 2, 3))
            by_bias = jax.jvp(
                lambda bias: f(*arrays[:2], bias, arrays[3]), arrays[2:3], arrays[2:3]
            )
            return by_all(*arrays), by_bias, jax.jvp(by_all, arrays, arrays)

        return jax.jit(derive)

    arrays = [
        integers(seed, shape)
        for seed, shape in enumerate((case.x_shape, case.w_shape, (case.k,), case.y_shape))
    ]
    plain = conv(case, activation)
    divided = jax.shard_map(
        plain, mesh=mesh(AxisType.Auto), in_specs=tuple(specs), out_specs=specs[3],
        check_vma=check_vma,
    )  # fmt: skip
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-3),
        derivatives(divided)(*arrays),
        derivatives(plain)(*arrays),
    )


@parametrize(CASES)
def test_operands_that_the_compiler_divides(case: Case):
    x, w = case.operands("y", integers)
    divided = jax.device_put(x, NamedSharding(mesh(AxisType.Auto), by_images(case, "x")))
    assert_equal(jax.jit(case.conv)(divided, w), case.lax_conv(x, w))


def test_explicit_sharding_is_refused():
    explicit = mesh(AxisType.Explicit)
    x = jax.device_put(jnp.ones((4, 2, 6, 6)), NamedSharding(explicit, P("devices")))
    w = jax.device_put(jnp.ones((3, 2, 2, 2)), NamedSharding(explicit, P()))
    text = (
        r"jaxcudnn.conv_fprop: image and weight must not be sharded over explicit mesh axes, got "
        r"float32\[4@devices,2,6,6\] and float32\[3,2,2,2\]; call it inside jax.shard_map"
    )
    with jax.set_mesh(explicit), pytest.raises(NotImplementedError, match=text):
        jaxcudnn.conv_fprop(x, w, padding=0)


# Arguments of calls that different primitives compute, of 4 x 2 images with 2 channels.
READINGS = {
    "forward": {"padding": "SAME"},
    "cropped": {"padding": ((-1, 3), (-1, 2))},
    "transposed": {"padding": ((3, 3), (-1, 2)), "lhs_dilation": (2, 1)},
    "by phases": {
        "padding": ((3, 3), (0, 2)), "window_strides": (2, 1), "lhs_dilation": (3, 1),
        "rhs_dilation": (2, 1),
    },
}  # fmt: skip


def of_mapped_axis(functions, **arguments):
    conv = partial(functions.conv_general_dilated, **{"window_strides": (1, 1)} | arguments)
    return jax.vmap(conv, (0, None))


def explicitly_sharded(dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Images mapped over the first axis, which devices divide, and a filter that all have."""
    devices = mesh(AxisType.Explicit)
    xs, w = integers(0, (4, 2, 2, 5, 5)).astype(dtype), integers(1, (3, 2, 3, 3)).astype(dtype)
    shardings = NamedSharding(devices, P("devices")), NamedSharding(devices, P())
    return jax.device_put(xs, shardings[0]), jax.device_put(w, shardings[1])


def assert_same_types_and_values(ours, theirs) -> None:
    assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bool"])
@pytest.mark.parametrize("name", READINGS)
def test_vmap_over_an_explicitly_sharded_axis(name: str, dtype: str):
    """`vmap` comes past the check of the arguments."""
    with jax.set_mesh(mesh(AxisType.Explicit)):
        operands = explicitly_sharded(dtype)
        ours, theirs = (
            jax.jit(of_mapped_axis(functions, **READINGS[name]))(*operands)
            for functions in (jaxcudnn, lax)
        )
        assert_same_types_and_values(ours, theirs)
        assert jax.typeof(ours).sharding.spec[0] == "devices"


@pytest.mark.parametrize("name", READINGS)
def test_derivatives_of_a_vmap_over_an_explicitly_sharded_axis(name: str):
    def run(functions):
        conv = of_mapped_axis(functions, **READINGS[name])
        gradient = jax.grad(lambda xs, w: jnp.sum(conv(xs, w) ** 2), (0, 1))
        return lambda xs, w: (gradient(xs, w), jax.jvp(conv, (xs, w), (xs, w)))

    with jax.set_mesh(mesh(AxisType.Explicit)):
        operands = explicitly_sharded()
        assert_same_types_and_values(*(jax.jit(run(f))(*operands) for f in (jaxcudnn, lax)))


def test_an_explicitly_sharded_cotangent_or_tangent_of_replicated_operands():
    devices = mesh(AxisType.Explicit)
    divided = NamedSharding(devices, P("devices"))
    x, w = (
        jax.device_put(a, NamedSharding(devices, P()))
        for a in (integers(0, (4, 2, 5, 5)), integers(1, (3, 2, 3, 3)))
    )

    def run(functions):
        conv = partial(functions.conv_general_dilated, window_strides=(1, 1), padding="SAME")
        loss = lambda x, w: jnp.sum(jax.sharding.reshard(conv(x, w), divided) ** 2)  # noqa: E731
        tangent = jax.jvp(lambda x: conv(x, w), (x,), (jax.device_put(x, divided),))
        return tangent, jax.grad(loss, (0, 1))(x, w)

    with jax.set_mesh(devices):
        assert_same_types_and_values(run(jaxcudnn), run(lax))


def test_what_lax_cannot_map_is_refused_as_by_lax():
    """A filter for each device: the mapped axis becomes channels of the result."""
    devices = mesh(AxisType.Explicit)
    with jax.set_mesh(devices):
        x = jax.device_put(jnp.ones((2, 2, 5, 5)), NamedSharding(devices, P()))
        ws = jax.device_put(jnp.ones((4, 3, 2, 3, 3)), NamedSharding(devices, P("devices")))
        for functions in (jaxcudnn, lax):
            conv = partial(functions.conv_general_dilated, window_strides=(1, 1), padding="SAME")
            with pytest.raises(Exception, match="out_sharding"):
                jax.vmap(conv, (None, 0))(x, ws)


def test_replicated_operands_of_an_explicit_mesh_are_taken():
    explicit = mesh(AxisType.Explicit)
    x, w = (
        jax.device_put(a, NamedSharding(explicit, P())) for a in CASES[0].operands("y", integers)
    )
    with jax.set_mesh(explicit):
        assert_equal(jax.jit(CASES[0].conv)(x, w), CASES[0].lax_conv(x, w))
