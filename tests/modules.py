# SPDX-License-Identifier: Apache-2.0
"""What the tests of the modules for Flax, Equinox and Haiku share.

Parameters and inputs are small integers, so that every sum is exact in every order and dtype, and
what ours compute is compared with what the stock modules do by `==`.
"""

import importlib
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aot import parse_attributes
from jaxcudnn import _load, _modules
from jaxcudnn.flax import convert_filters

NAMES: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": lambda y: jax.nn.leaky_relu(y, 0.01),
    "gelu": lambda y: jax.nn.gelu(y, approximate=False),
    "gelu_tanh": lambda y: jax.nn.gelu(y, approximate=True),
    "silu": jax.nn.silu,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}
UNKNOWN = (
    "activation must be None, a callable or one of relu, relu6, leaky_relu, gelu, gelu_tanh, silu, "
    "elu, softplus, tanh, sigmoid, got "
)


def halved(y):
    """An activation that has no name."""
    return jnp.minimum(y, jnp.asarray(0.5, y.dtype) * y)


ACTIVATIONS = [None, "relu", halved]


def reference(activation: Any) -> Callable[[Any], Any]:
    """What an `activation` argument stands for, by name in float32 and rounded once."""
    if isinstance(activation, str):
        return lambda y: NAMES[activation](y.astype(jnp.float32)).astype(y.dtype)
    return activation or (lambda y: y)


def integers(shape: Sequence[int], dtype: Any = "float32") -> np.ndarray:
    """Integers from -1 to 1, always the same ones for a shape."""
    drawn = np.random.default_rng(list(shape)).integers(-1, 2, tuple(shape))
    return drawn.astype(jnp.dtype(dtype))


def initial(_key: Any, shape: Sequence[int], dtype: Any) -> jax.Array:
    """An initialiser, as Flax calls one."""
    return jnp.asarray(integers(shape, dtype))


def pairwise(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Choices of one value of each axis, such that any two values of two axes meet somewhere."""
    indices = [range(len(values)) for values in axes.values()]
    pairs = list(itertools.combinations(range(len(axes)), 2))
    wanted = {(a, i, b, j) for a, b in pairs for i in indices[a] for j in indices[b]}
    rows = []
    while wanted:
        a, i, b, j = min(wanted)
        row: dict[int, int] = {a: i, b: j}
        for axis in range(len(axes)):
            if axis not in row:
                row[axis] = max(indices[axis], key=lambda value: _met(wanted, row | {axis: value}))
        wanted = {each for each in wanted if not _has(row, each)}
        rows.append({n: v[row[k]] for k, (n, v) in enumerate(axes.items())})
    return rows


def _has(row: dict[int, int], pair: tuple[int, int, int, int]) -> bool:
    a, i, b, j = pair
    return row.get(a) == i and row.get(b) == j


def _met(wanted: set[tuple[int, int, int, int]], row: dict[int, int]) -> int:
    return sum(_has(row, pair) for pair in wanted)


def name_of(value: Any) -> str:
    """An id for `pytest.mark.parametrize`."""
    if isinstance(value, dict):
        return "-".join(name_of(each) for each in value.values())
    return getattr(value, "__name__", str(value)).replace(" ", "")


HALF, FLOAT = jnp.bfloat16, jnp.float32

# Of Flax's modules, NNX's and Linen's.
CONV_GEOMETRIES: list[dict[str, Any]] = [
    {"kernel_size": (3, 2), "strides": (2, 1), "padding": "SAME"},
    {"kernel_size": (2, 3), "padding": "VALID", "kernel_dilation": (1, 2)},
    {"kernel_size": (3, 3), "padding": "CIRCULAR", "strides": 2},
    {"kernel_size": (3, 2), "padding": "REFLECT", "kernel_dilation": 2},
    {"kernel_size": 3, "padding": "CAUSAL", "kernel_dilation": 2, "strides": None},
    {"kernel_size": [3], "padding": 2, "input_dilation": 2},
    {"kernel_size": (2, 3), "padding": [(0, 1), 2], "input_dilation": (1, 2), "strides": 2},
    {"kernel_size": (2, 2, 2), "padding": "SAME", "kernel_dilation": None},
]
TRANSPOSE_GEOMETRIES: list[dict[str, Any]] = [
    {"kernel_size": (3, 2), "strides": (2, 1), "padding": "SAME"},
    {"kernel_size": (2, 3), "padding": "VALID", "kernel_dilation": (1, 2)},
    {"kernel_size": (3, 3), "padding": "CIRCULAR", "strides": (2, 2)},
    {"kernel_size": 3, "padding": 2, "kernel_dilation": (2,)},
    {"kernel_size": (2, 3), "padding": [(0, 1), 2], "strides": (2, 2)},
    {"kernel_size": (2, 2, 2), "padding": "SAME", "strides": None},
]


def flax_convs(geometries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    cases = pairwise(
        geometry=geometries,
        dtypes=[{}, {"dtype": HALF}],
        groups=[1, 2],
        use_bias=[True, False],
        masked=[False, True],
        activation=[None, "relu"],
        layout=["HWIO", "OHWI"],
        batch=[(2,), ()],
    )
    rare = {"dtypes": {"param_dtype": HALF}, "activation": halved, "batch": (2, 1)}
    return [*cases, cases[0] | rare, cases[1] | rare]


def flax_transposes(geometries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    cases = pairwise(
        geometry=geometries,
        dtypes=[{}, {"dtype": HALF}],
        transpose_kernel=[False, True],
        use_bias=[True, False],
        masked=[False, True],
        activation=[None, "relu"],
        layout=["HWIO", "OHWI", "IHWO"],
        batch=[(2,), ()],
    )
    # Then bias and result are of two dtypes.
    rare = {"dtypes": {"preferred_element_type": FLOAT, "param_dtype": HALF}, "batch": (2, 1)}
    one = rare | {"use_bias": True, "activation": "relu"}
    return [*cases, cases[0] | one, cases[1] | rare | {"activation": halved}]


class FlaxCase:
    """One of those as arguments of modules of 4 input and 6 output features, stock and ours."""

    def __init__(self, case: dict[str, Any]):
        window = case["geometry"]["kernel_size"]
        window = (window,) if isinstance(window, int) else tuple(window)
        dtype = case["dtypes"].get("param_dtype", FLOAT)
        self.activation = case["activation"]
        self.convert = partial(convert_filters, source="HWIO", target=case["layout"])
        self.x = integers((*case["batch"], *(5, 6, 4)[: len(window)], 4), dtype)
        self.stock: dict[str, Any] = {
            **case["geometry"],
            **case["dtypes"],
            "use_bias": case["use_bias"],
            "kernel_init": initial,
            "bias_init": initial,
        }
        if "groups" in case:
            self.stock["feature_group_count"] = case["groups"]
            channels = (4 // case["groups"], 6)
        else:
            self.stock["transpose_kernel"] = case["transpose_kernel"]
            channels = (6, 4) if case["transpose_kernel"] else (4, 6)
        self.ours = self.stock | {
            "activation": self.activation,
            "filter_layout": case["layout"],
        }
        if case["masked"]:
            self.stock["mask"] = np.abs(integers((*window, *channels), dtype))
            self.ours["mask"] = self.convert(self.stock["mask"])


class Side(NamedTuple):
    """A module as two functions, of which the second is pure."""

    params: Any
    apply: Callable[[Any, Any], jax.Array]

    def outcome(self, params: Any, x: Any, then: Callable[[Any], Any] = lambda y: y) -> Any:
        """The output, and the gradients of parameters and input for a cotangent of integers."""
        y, pull = jax.vjp(lambda p, x: then(self.apply(p, x)), params, x)
        return y, *pull(jnp.asarray(integers(y.shape, y.dtype)))


def assert_same(
    ours: Side,
    stock: Side,
    x: np.ndarray,
    activation: Any = None,
    convert: Callable[[Any], Any] = lambda tree: tree,
) -> None:
    """Check parameters, output and gradients; `convert` reorders filters as ours are."""
    assert_equal(ours.params, convert(stock.params))

    def both(ours_params: Any, stock_params: Any, x: Any) -> Any:
        y, dparams, dx = stock.outcome(stock_params, x, reference(activation))
        return ours.outcome(ours_params, x), (y, convert(dparams), dx)

    # Most of the time goes into compiling; values are exact, optimised or not.
    lowered = jax.jit(both).lower(ours.params, stock.params, x)
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    compiled = lowered.compile(compiler_options=options)
    mine, theirs = compiled(ours.params, stock.params, x)
    assert_equal(mine, theirs)
    assert np.any(np.asarray(theirs[0])), "a test of zeros"


def assert_equal(ours: Any, stock: Any) -> None:
    """Check two trees for the same structure, shapes, dtypes and bits."""
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


class Program:
    """What XLA gets for CUDA of a function."""

    def __init__(self, f: Callable[..., Any], *arguments: Any):
        # A new function each time, so that nothing is remembered from other tests.
        traced = jax.jit(lambda *arguments: f(*arguments)).trace(*arguments)
        self.text = traced.lower(lowering_platforms=("cuda",)).as_text()
        lines = self.text.splitlines()
        self.calls = [line for line in lines if f"custom_call @{_load.TARGET}(" in line]

    @property
    def operations(self) -> list[str]:
        """What our custom calls compute, sorted; there must be no other convolution."""
        assert "stablehlo.convolution" not in self.text
        return sorted(parse_attributes(line)["op"] for line in self.calls)

    @property
    def reorders(self) -> bool:
        """Whether an array has to be brought into another order, be it by XLA for our calls."""
        orders = re.findall(r"dense<\[([\d, ]+)\]> : tensor<\dxindex>", "".join(self.calls))
        numbers = [[int(axis) for axis in order.split(", ")] for order in orders]
        assert len(numbers) == 3 * len(self.calls)
        in_order = all(order == sorted(order, reverse=True) for order in numbers)
        return "stablehlo.transpose" in self.text or not in_order


def gradients(side: Side) -> Callable[[Any, Any], Any]:
    """Those of parameters and input."""
    return jax.grad(lambda params, x: jnp.sum(jnp.square(side.apply(params, x))), (0, 1))


class Recorder:
    """Counts the calls that convolve, add and activate at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[tuple[str, tuple[int, ...] | None, Any]] = []
        for name in ("conv_bias_act", "conv_transpose_bias_act"):
            monkeypatch.setattr(_modules, name, partial(self._call, name, getattr(_modules, name)))

    def _call(self, name: str, function: Any, lhs: Any, rhs: Any, bias: Any, **arguments: Any):
        shape = None if bias is None else bias.shape
        self.calls.append((name, shape, arguments["activation"]))
        return function(lhs, rhs, bias, **arguments)


def assert_named(output: Any, convolution: Any, name: str) -> None:
    """Check a named activation of a convolution without one.

    exp, tanh and erf err by a few units in the last place, differently where they are compiled with
    something else; numbers here are below 16.
    """
    expected = np.asarray(reference(name)(convolution))
    assert np.max(np.abs(expected)) < 16
    assert np.max(np.abs(np.asarray(output) - expected)) <= 4 * np.spacing(np.float32(16))


def assert_refused_alike(ours: Callable[[], Any], stock: Callable[[], Any]) -> None:
    """Check that both raise, the same or what explains it better.

    Where XLA raises a RuntimeError, and `lax` a TypeError for a rank or nothing but an assertion,
    our functions raise a ValueError. Haiku leaves out its
    class's name, and with another layout the shapes of a mask are others.
    """
    mine, theirs = map(_refusal, (ours, stock))
    if type(mine) is not type(theirs):
        assert type(mine) is ValueError
        assert type(theirs) in (RuntimeError, TypeError, AssertionError)
        assert str(mine).startswith("jaxcudnn.")
    if not str(mine).startswith("jaxcudnn."):
        text, expected = (str(error).split("Shapes are")[0] for error in (mine, theirs))
        assert text.endswith(expected)


def _refusal(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except Exception as error:  # any: it is compared with another
        return error
    raise AssertionError("nothing was raised")


def assert_says_what_to_install(monkeypatch, module: str, package: str, distribution: str):
    """Import one of ours where what it is for is missing."""
    name = f"jaxcudnn.{module}"
    monkeypatch.setitem(sys.modules, package, None)
    for known in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, known)
    text = (
        f"{name}: {distribution} must be installed, got no module '{package}'; do `pip install "
        f"{distribution}`, or install jaxcudnn[{module}]"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$") as raised:
        importlib.import_module(name)
    assert raised.value.name == package
