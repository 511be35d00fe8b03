# SPDX-License-Identifier: Apache-2.0
"""Convolutions that users of other libraries reported as slow, failing or wrong: every pass.

On every device at reduced sizes (reported.reduced says how), and on the GPU at the reported sizes
too, at drawn elements. Expected values are those of the definition in float64, from oracle.py or
sampled.py. What else a report was about, beside a convolution's sizes, follows below.
"""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cases
import jaxcudnn
import oracle
import sampled
from cases import OPERANDS, integers, normal
from reported import DATA, PASSES, Reported, load, load_sweep, reduced
from tolerance import assert_close

REPORTED, SWEEP = load(), load_sweep()


def named(name: str) -> Reported:
    (found,) = (reported for reported in REPORTED if reported.name == name)
    return found


def over(table: list[Reported]):
    return pytest.mark.parametrize("reported", table, ids=lambda reported: reported.name)


on_cpu_and_gpu = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
)


def passes(reported: Reported, convolve=jaxcudnn.conv_general_dilated, **options):
    """All passes as one function of the arrays x, w and y, the last a gradient."""
    functions = {which: reported.function(which, convolve, **options) for which in reported.passes}

    def run(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            which: function(*(arrays[role] for role in reported.roles(which)[:2]))
            for which, function in functions.items()
        }

    return run


def draw(reported: Reported, how) -> dict[str, jax.Array]:
    return {
        role: how(seed, reported.case.shape(role), reported.dtype_of(role))
        for seed, role in enumerate("xwy")
    }


def expected(reported: Reported, which: str, arrays) -> tuple[np.ndarray, np.ndarray]:
    role = reported.roles(which)[2]
    operands = (arrays[name] for name in OPERANDS[role])
    return oracle.compute(role, *operands, case=reported.case, flip=reported.transposed)


def check_every_pass(reported: Reported, run, *, tf32: bool) -> None:
    """Compare small integers with ==, and random numbers within the bound on their rounding."""
    arrays = draw(reported, integers)
    for which, computed in run(arrays).items():
        exact, _ = expected(reported, which, arrays)
        result = jnp.dtype(reported.dtype_of(reported.roles(which)[2]))
        assert computed.dtype == result
        np.testing.assert_array_equal(computed, exact.astype(result), err_msg=which)
    if reported.dtype not in cases.DTYPES:
        return  # in 8 bits a gradient of another dtype may be rounded before it is multiplied
    arrays = draw(reported, normal)
    for which, computed in run(arrays).items():
        exact, magnitude = expected(reported, which, arrays)
        role = reported.roles(which)[2]
        length = reported.case.lengths[role]
        dtype = reported.dtype_of(role)
        assert_close(computed, exact, magnitude, dtype=dtype, length=length, tf32=tf32)


# Every convolution, every pass


@over([reduced(reported) for reported in REPORTED + SWEEP])
def test_reduced_size(reported: Reported):
    check_every_pass(reported, jax.jit(passes(reported)), tf32=False)


@pytest.mark.gpu
@over([reduced(reported) for reported in REPORTED + SWEEP])
def test_reduced_size_on_gpu(reported: Reported):
    run = jax.jit(passes(reported))
    if reported.dtype in cases.DTYPES:
        text = run.lower(draw(reported, integers)).as_text()
        assert "stablehlo.convolution" not in text  # no fall-back to lax
    check_every_pass(reported, run, tf32=reported.dtype == "float32")


@pytest.mark.gpu
@pytest.mark.xdist_group("large")
@over(REPORTED)
def test_reported_size_on_gpu(reported: Reported):
    """The operands are made where they are used, and only drawn elements leave the device."""
    case, numbers = reported.case, sampled.exact_numbers(reported.case)
    dtypes = {role: reported.dtype_of(role) for role in "xwy"}
    computed_roles = {which: reported.roles(which)[2] for which in reported.passes}
    points = {which: sampled.draw_points(case, role) for which, role in computed_roles.items()}

    @jax.jit
    def run(seed, points):
        arrays = {role: numbers.fill(case, role, dtypes[role], seed) for role in "xwy"}
        return {
            which: sampled.take(result, case, computed_roles[which], points[which])
            for which, result in passes(reported)(arrays).items()
        }

    for which, computed in run(jnp.uint32(7), points).items():
        role = computed_roles[which]
        exact, magnitude = sampled.compute(
            role, case, points[which], numbers, dtypes, seed=7, flip=reported.transposed
        )
        assert np.max(magnitude, initial=0) < sampled.EXACT
        np.testing.assert_array_equal(computed, exact.astype(dtypes[role]), err_msg=which)


# What the tests above rest on


def test_every_entry_is_there():
    entries = json.loads(DATA.read_text())
    assert len(entries) == 41
    names = [reported.name for reported in REPORTED]
    assert len({*names}) == len(names) == 41 + 2 + 1  # the sweep three times, 8-bit floats twice
    for entry in entries:
        repository, number = entry["source"].split("/")[1].split("#")
        found = [r for r in REPORTED if r.name.startswith(f"{repository}#{number}")]
        assert found
        for reported in found:
            assert reported.dtype == entry["dtype"]
            assert reported.transposed == entry["transposed"]
            assert reported.case.groups == entry["groups"]
            assert reported.passes == (PASSES[:1] if entry["dtype"] == "int8" else PASSES)
    assert named("jax#14585").arguments["preferred_element_type"] == "int32"
    assert named("jax#17464").case.dimension_numbers == ("NHWC", "HWOI", "NHWC")
    assert named("pytorch#169688").case.dimension_numbers == ("NDHWC", "ODHWI", "NDHWC")
    assert named("jax#30469").case.dimension_numbers == ("NHWC", "HWIO", "NHWC")


def test_sweep_meets_every_pair():
    assert {(len(r.case.size), max(r.case.dilation)) for r in SWEEP} == {
        (n, d) for n in (1, 2, 3) for d in (1, 2, 3, 4, 5)
    }
    assert {(r.case.groups, r.case.window[0]) for r in SWEEP} == {
        (g, k) for g in (1, 2, 4, 8) for k in (1, 2, 3)
    }
    assert {(r.case.strides[0], r.case.pads[0]) for r in SWEEP} == {
        (s, (p, p)) for s in (1, 2) for p in (0, 1, 2)
    }
    assert len(SWEEP) < 40


@over(REPORTED + SWEEP)
def test_what_reducing_keeps(reported: Reported):
    whole, small = reported.case, reduced(reported).case
    assert (small.padding, small.dilation) == (whole.padding, whole.dilation)
    assert small.dimension_numbers == whole.dimension_numbers
    for window, stride, was, strode in zip(
        small.window, small.strides, whole.window, whole.strides, strict=True
    ):
        assert window * strode == was * stride
        assert window == was or was > 1000
    for role in "xwy":
        assert (0 in small.shape(role)) == (0 in whole.shape(role))
    assert (small.groups == small.c) == (whole.groups == whole.c)
    assert small.c // small.groups % 4 == whole.c // whole.groups % 4
    assert small.k // small.groups % 4 == whole.k // whole.groups % 4
    meetings = [taps for _, taps, _ in oracle._meetings(small, flip=False)]
    assert len(meetings) < 5000
    if "31x31" not in str(reported):  # of which one dimension would be too much work
        assert len({*meetings}) == math.prod(small.window)


@over([reported for reported in REPORTED if reported.transposed])
def test_transposed_as_lax_names_it(reported: Reported):
    entries = json.loads(DATA.read_text())
    (entry,) = (e for e in entries if e["source"].endswith(reported.name))
    numbers = reported.arguments["dimension_numbers"]

    def transpose(padding, strides):
        def apply(a, w):
            return lax.conv_transpose(a, w, strides, padding, dimension_numbers=numbers)

        return apply

    torch = entry["source"].startswith("pytorch/")
    padding = "VALID" if torch else entry["pad"]  # PyTorch's 0 crops nothing
    operands = reported.aval(reported.roles("fwd")[0]), reported.aval("w")
    whole = jax.eval_shape(transpose(padding, entry["stride"]), *operands)
    assert whole.shape == reported.case.x_shape
    positions = [whole.shape[axis] for axis in reported.case.axes("x")[2:]]
    assert (
        positions
        == {
            "jax#17464": [128, 128],
            "xla#5541": [144, 144],
            "pytorch#51044": [109000],
        }[reported.name]
    )

    small = reduced(reported)
    arrays = draw(small, integers)
    computed = transpose(padding, small.case.strides)(arrays["y"], arrays["w"])
    exact, _ = expected(small, "fwd", arrays)
    np.testing.assert_array_equal(computed, exact.astype("float32"))


def every_index(case, role: str):
    """Logical indices of all elements, and the order that brings them into the user's layout."""
    axes = case.axes(role)
    return np.ix_(*(np.arange(case.shape(role)[axis]) for axis in axes)), np.argsort(axes)


@over([reduced(reported) for reported in REPORTED])
def test_definition_at_points_is_the_definition(reported: Reported):
    case, arrays = reported.case, {}
    dtypes = {role: reported.dtype_of(role) for role in "xwy"}
    for role in "xwy":
        index, order = every_index(case, role)
        arrays[role] = sampled.REALS.at(role, dtypes[role], 5, *index).transpose(order)
    for which in reported.passes:
        role = reported.roles(which)[2]
        points = sampled.draw_points(case, role)
        at = sampled.compute(
            role, case, points, sampled.REALS, dtypes, seed=5, flip=reported.transposed
        )
        for computed, whole in zip(at, expected(reported, which, arrays), strict=True):
            taken = whole.transpose(case.axes(role))[tuple(points.T)]
            np.testing.assert_allclose(computed, taken, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("numbers", [sampled.INTEGERS, sampled.SIGNS, sampled.REALS])
def test_numbers_are_the_same_on_device_and_host(numbers):
    fill = jax.jit(numbers.fill, static_argnums=(0, 1, 2))
    for name, dtype in (("pytorch#169688", "bfloat16"), ("jax#17464", "float32")):
        case = reduced(named(name)).case
        for role in "xwy":
            index, order = every_index(case, role)
            filled = fill(case, role, dtype, jnp.uint32(5))
            values = numbers.at(role, dtype, 5, *index)
            np.testing.assert_array_equal(np.asarray(filled, np.float64), values.transpose(order))
            points = sampled.draw_points(case, role)
            taken = sampled.take(filled, case, role, jnp.asarray(points))
            np.testing.assert_array_equal(
                np.asarray(taken, np.float64), numbers.at(role, dtype, 5, *points.T)
            )


def test_numbers_are_spread_evenly():
    index = np.ix_(np.arange(4), np.arange(512), np.arange(512))
    for numbers, likely in (
        (sampled.INTEGERS, dict.fromkeys(range(-3, 4), 1 / 7)),
        (sampled.SIGNS, {-1: 1 / 8, 0: 3 / 4, 1: 1 / 8}),
    ):
        values, counts = np.unique(numbers.at("x", "float16", 0, *index), return_counts=True)
        assert dict(zip(values, counts / counts.sum(), strict=True)) == pytest.approx(
            likely, abs=2e-3
        )
    reals = sampled.REALS.at("x", "float32", 0, *index)
    assert abs(reals.mean()) < 2e-3 and abs(reals.var() - 1 / 6) < 1e-3
    neighbours = [np.corrcoef(reals[0].ravel(), np.roll(reals[0], 1, axis).ravel())[0, 1]
                  for axis in (0, 1)]  # fmt: skip
    others = (
        sampled.REALS.at("x", "float32", 1, *index),
        sampled.REALS.at("y", "float32", 0, *index),
    )
    neighbours += [np.corrcoef(reals.ravel(), other.ravel())[0, 1] for other in others]
    assert np.max(np.abs(neighbours)) < 1e-2


def test_long_sums_stay_exact():
    assert sampled.exact_numbers(named("jax#25461").case) is sampled.SIGNS
    assert sampled.exact_numbers(named("jax#8506").case) is sampled.INTEGERS


# What the reports were about beside sizes


@on_cpu_and_gpu
def test_second_derivatives_of_two_layers(platform):
    """jax#563: the Hessian of a 1x1 layer and a strided one after it, of which all is known."""
    arguments = named("jax#563").arguments
    unstrided: dict[str, Any] = arguments | {"window_strides": (1, 1)}
    x = integers(0, (1, 32, 32, 1))
    direction = integers(1, x.shape)
    w = {"first": jnp.full((1, 1, 1, 1), 3.0), "second": jnp.full((1, 1, 1, 1), 2.0)}

    def loss(w, x):
        h = jaxcudnn.conv_general_dilated(x, w["first"], **unstrided)
        return jnp.sum(jaxcudnn.conv_general_dilated(h, w["second"], **arguments) ** 2)

    kept = np.asarray(x)[:, ::2, ::2] ** 2
    found = jax.tree.map(lambda a: float(a.squeeze()), jax.jit(jax.hessian(loss))(w, x))
    second = {
        ("first", "first"): 2 * 2**2, ("first", "second"): 4 * 3 * 2,
        ("second", "first"): 4 * 3 * 2, ("second", "second"): 2 * 3**2,
    }  # fmt: skip
    assert {(a, b): found[a][b] for a, b in second} == {
        key: factor * float(kept.sum()) for key, factor in second.items()
    }

    @jax.jit
    def product(x, direction):
        return jax.jvp(lambda x: jax.grad(loss, argnums=1)(w, x), (x,), (direction,))[1]

    exact = np.zeros(x.shape)
    exact[:, ::2, ::2] = 2 * (3 * 2) ** 2 * np.asarray(direction)[:, ::2, ::2]
    np.testing.assert_array_equal(product(x, direction), exact.astype("float32"))


@on_cpu_and_gpu
def test_filter_gradients_of_1024_replicated_examples(platform):
    """jax#32157: vmap of grad, with the examples replicated over a mesh."""
    arguments = named("jax#32157").arguments
    (device,) = jnp.zeros(()).devices()
    replicated = jax.NamedSharding(jax.sharding.Mesh(np.array([device]), ("d",)), jax.P())
    x, w = jax.device_put((integers(0, (1024, 1, 4, 4)), integers(1, (1, 1, 3, 3))), replicated)

    def loss(w, x):
        return jnp.sum(jaxcudnn.conv_general_dilated(x[None], w, **arguments) ** 2) / 2

    computed = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(w, x)
    images, taps = np.asarray(x)[:, 0], np.asarray(w)[0, 0]
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), (1, 2))
    y = np.einsum("npqrs,rs->npq", windows, taps)
    exact = np.einsum("npqrs,npq->nrs", windows, y)
    np.testing.assert_array_equal(computed[:, 0, 0], exact)


@on_cpu_and_gpu
def test_gradients_of_a_causal_layer_cut_to_length(platform):
    """pytorch#136812: padded on both sides and cut, so that the gradient ends in zeros."""
    reported = named("pytorch#136812")
    case, arrays = reported.case, draw(named("pytorch#136812"), integers)
    length = case.size[0]
    ct = arrays["y"][..., :length]

    @jax.jit
    def gradients(x, w, ct):
        y, pullback = jax.vjp(lambda x, w: case.conv(x, w)[..., :length], x, w)
        return y, pullback(ct)

    y, (dx, dw) = gradients(arrays["x"], arrays["w"], ct)
    arrays["y"] = jnp.pad(ct, ((0, 0), (0, 0), (0, case.y_shape[2] - length)))
    for which, computed in (("fwd", y), ("dgrad", dx), ("wgrad", dw)):
        exact, _ = expected(reported, which, arrays)
        if which == "fwd":
            exact = exact[..., :length]
        np.testing.assert_array_equal(computed, exact.astype("float16"), err_msg=which)


@on_cpu_and_gpu
def test_one_image_alone_without_tf32(platform):
    """pytorch#107514: alone or in a batch an image may be summed in another order, not rounded."""
    reported = named("pytorch#107514")
    arrays = draw(reported, normal)
    forward = jax.jit(reported.function("fwd", jaxcudnn.conv_general_dilated, precision="highest"))
    exact, magnitude = expected(reported, "fwd", arrays)
    for n in (1, 8):
        computed = forward(arrays["x"][:n], arrays["w"])
        assert_close(
            computed, exact[:n], magnitude[:n], dtype="float32", length=reported.case.lengths["y"]
        )


@pytest.mark.parametrize("which", PASSES)
def test_negative_padding_reads_only_what_is_there(which):
    """xla#48713: what is cropped may be anything, NaN too."""
    reported = named("xla#48713")
    arrays = draw(reported, integers)
    inside = arrays["x"][:, :, 5:]
    arrays["x"] = arrays["x"].at[:, :, :5].set(jnp.nan)
    computed = jax.jit(passes(reported))(arrays)[which]
    arrays["x"] = jnp.zeros_like(arrays["x"]).at[:, :, 5:].set(inside)
    exact, _ = expected(reported, which, arrays)
    np.testing.assert_array_equal(computed, exact.astype("float32"))
