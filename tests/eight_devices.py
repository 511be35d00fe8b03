# SPDX-License-Identifier: Apache-2.0
"""Convolutions that XLA divides, which `test_sharding.py` runs in a process with eight CPU devices.

Operands are integers, so that sums in any order are equal, and every result has to be.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cases import CHANNELS_LAST, OPERANDS, Case, case, integers

NHWC = CHANNELS_LAST[2]
MESHES = {"8": {"a": 8}, "4": {"a": 4}, "4x2": {"a": 4, "b": 2}, "2x4": {"a": 2, "b": 4}}

PLAIN = case("plain", (16, 12), (3, 3), "SAME", n=8, c=8, k=16, dimension_numbers=NHWC)
STRIDED = case("strided", (17, 13), (3, 4), ((1, 2), (2, 0)), n=8, c=8, k=8, strides=(2, 3))
DILATED = case("dilated", (16, 16), (3, 3), ((2, 2), (3, 3)), n=8, c=8, k=8, dilation=(2, 3),
               dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
GROUPED = case("grouped", (9, 8), (3, 2), ((1, 1), (1, 0)), n=8, c=16, k=32, groups=8,
               dimension_numbers=NHWC)  # fmt: skip
DEPTHWISE = case("depthwise", (9, 8), (3, 3), "SAME", n=8, c=8, k=8, groups=8)
VOLUME = case("volume", (8, 6, 5), (3, 3, 3), "SAME", n=8, c=4, k=8,
              dimension_numbers=CHANNELS_LAST[3])  # fmt: skip
LINE = case("line", (33,), (5,), ((4, 0),), n=8, c=8, k=8, strides=(2,))

SPLITS: dict[str, tuple[dict[str, str], ...]] = {
    # By mesh: which of N, C, K and of the spatial dimensions 0 and 1 each axis divides.
    "8": ({"n": "a"}, {"c": "a"}, {"k": "a"}, {"0": "a"}),
    "4": ({"n": "a"}, {"0": "a"}, {"1": "a"}),
    "4x2": ({"n": "a", "0": "b"}, {"n": "b", "k": "a"}, {"0": "a", "1": "b"}, {"c": "a", "k": "b"}),
    "2x4": ({"n": "ab"}, {"n": "b", "c": "a"}, {"1": "b", "c": "a"}),
}


def mesh(name: str, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    sizes = MESHES[name]
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))])
    return jax.sharding.Mesh(
        devices.reshape(*sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes)
    )


def divided(case: Case, role: str, split: dict[str, str]) -> P:
    """Divide an array of a case: channels of x are C, those of y are K."""
    letters = {
        "x": ("n", "c", *map(str, range(len(case.size)))),
        "w": ("k", "c", *[""] * len(case.size)),
        "y": ("n", "k", *map(str, range(len(case.size)))),
    }[role]
    entries: list = [None] * len(letters)
    for letter, axis in zip(letters, case.axes(role), strict=True):
        if letter in split:
            entries[axis] = tuple(split[letter])
    return P(*entries)


def is_even(case: Case, role: str, spec: P, devices: jax.sharding.Mesh) -> bool:
    """Whether an array can be put on devices so."""
    for size, axes in zip(case.shape(role), spec, strict=False):
        if axes and size % int(np.prod([devices.shape[a] for a in axes])):
            return False
    return True


def put(array: jax.Array, case: Case, role: str, split, devices) -> jax.Array:
    spec = divided(case, role, split)
    if not is_even(case, role, spec, devices):
        spec = P()
    return jax.device_put(array, NamedSharding(devices, spec))


POSSIBLE = [
    pytest.param(case, name, split, id=f"{case.name}-{name}-{'-'.join(k + v for k, v in split.items())}")
    for case in (PLAIN, STRIDED, DILATED, GROUPED, DEPTHWISE, VOLUME, LINE)
    for name, splits in SPLITS.items()
    for split in splits
    if all(not letter.isdigit() or int(letter) < len(case.size) for letter in split)
]  # fmt: skip


@pytest.mark.parametrize(("case", "name", "split"), POSSIBLE)
def test_every_pass(case: Case, name: str, split: dict[str, str]):
    devices = mesh(name)
    x, w = case.operands("y", integers)
    dy = integers(5, case.y_shape)

    def passes(x, w, dy):
        y, pullback = jax.vjp(case.conv, x, w)
        return y, *pullback(dy)

    given = [put(a, case, r, split, devices) for a, r in zip((x, w, dy), "xwy", strict=True)]
    out = [
        NamedSharding(devices, spec if is_even(case, role, spec, devices) else P())
        for role in "yxw"
        for spec in [divided(case, role, split)]
    ]
    computed = jax.jit(passes, out_shardings=tuple(out))(*given)
    for ours, exact in zip(computed, jax.jit(passes)(x, w, dy), strict=True):
        np.testing.assert_array_equal(ours, exact)


@pytest.mark.parametrize("role", OPERANDS)
@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("axis", range(4))
def test_any_axis_of_one_operand(role: str, operand: int, axis: int):
    """Also those that cannot be split: of them every device computes the same."""
    devices = mesh("4")
    arrays = list(PLAIN.operands(role, integers))
    if arrays[operand].shape[axis] % 4:
        arrays[operand] = jnp.asarray(arrays[operand])
        spec = P()
    else:
        spec = P(*[None] * axis, "a")
    expected = jax.jit(PLAIN.cudnn(role))(*arrays)
    arrays[operand] = jax.device_put(arrays[operand], NamedSharding(devices, spec))
    np.testing.assert_array_equal(jax.jit(PLAIN.cudnn(role))(*arrays), expected)


@pytest.mark.parametrize("split", [{"n": "a"}, {"0": "a"}, {"n": "a", "0": "b"}], ids=str)
def test_second_derivatives(split: dict[str, str]):
    devices = mesh("4x2")
    x, w = PLAIN.operands("y", integers)

    def loss(x, w):
        return jnp.sum(PLAIN.conv(x, w) ** 2)

    def second(x, w):
        gradient = jax.grad(loss, (0, 1))
        return jax.jvp(gradient, (x, w), (x, w))

    given = put(x, PLAIN, "x", split, devices), put(w, PLAIN, "w", split, devices)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(second)(*given), jax.jit(second)(x, w))


@pytest.mark.parametrize("kinds", [(AxisType.Explicit, AxisType.Auto)], ids=["explicit-auto"])
def test_mixed_meshes(kinds):
    devices = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=kinds
    )
    x, w = PLAIN.operands("y", integers)
    with jax.set_mesh(devices):
        given = [
            jax.device_put(x, NamedSharding(devices, P("a"))),
            jax.device_put(w, NamedSharding(devices, P())),
        ]

        def passes(x, w):
            x = jax.lax.with_sharding_constraint(x, P("a", "b"))
            return jax.value_and_grad(lambda x, w: jnp.sum(PLAIN.conv(x, w) ** 2), (0, 1))(x, w)

        computed = jax.jit(passes)(*given)
    loss = partial(lambda x, w: jnp.sum(PLAIN.conv(x, w) ** 2))
    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    jax.tree.map(np.testing.assert_array_equal, computed, expected)
