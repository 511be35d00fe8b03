# SPDX-License-Identifier: Apache-2.0
"""What the modules for Flax, Equinox and Haiku share: stock code run with our convolutions.

No code of a stock module is repeated. It runs as it stands, and where it calls for a convolution it
gets one of ours; or, if an activation is to follow, a `Sum`, which is computed when the stock code
adds the bias to it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import jax
from jax import lax

from . import _activations
from ._activations import ACTIVATIONS
from ._api import conv_general_dilated
from ._bias_act import conv_bias_act, conv_transpose_bias_act
from ._variants import conv_transpose

Activation = str | Callable[[Any], Any] | None
"""What follows the bias: an activation that can be fused, by name; any function; nothing."""


def require(package: str, distribution: str, module: str) -> None:
    """Say in one sentence what to install for `module`, if it is missing.

    Raises:
        ImportError: if it is.
    """
    if find_spec(package) is None:
        raise ImportError(
            f"jaxcudnn.{module}: {distribution} must be installed, got no module {package!r}; do "
            f"`pip install {distribution}`, or install jaxcudnn[{module}]",
            name=package,
        )


def check_activation(module: str, activation: Any) -> Activation:
    """Check an `activation` argument.

    Raises:
        ValueError: for a name that is none of an activation.
        TypeError: for what is neither a name, nor callable, nor None.
    """
    is_name = isinstance(activation, str)
    if activation is None or (activation in ACTIVATIONS if is_name else callable(activation)):
        return activation
    raise (ValueError if is_name else TypeError)(
        f"jaxcudnn.{module}: activation must be None, a callable or one of "
        f"{', '.join(ACTIVATIONS)}, got {activation!r}; pass another as a function, which is then "
        f"applied to the output"
    )


class View:
    """An object, such as a module that must not change, with some of its attributes replaced."""

    def __init__(self, viewed: Any, **replaced: Any):
        self.__dict__.update(replaced)
        self._viewed = viewed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Give the code of a function with other meanings of names that it has from its own module.

    Unlike a patch of the module it is seen by nobody else, in this thread or another. What wraps
    the function is left off: our modules' methods are wrapped likewise, and once is enough.

    Raises:
        RuntimeError: if the function has no such name, so that nothing would be replaced.
    """
    stock: Any = inspect.unwrap(function)
    for name in names:
        if name not in stock.__code__.co_names:
            raise RuntimeError(
                f"jaxcudnn: {stock.__module__}.{stock.__qualname__} must refer to {name!r}, got a "
                f"version that does not; install one that jaxcudnn is tested with"
            )
    copy = FunctionType(
        stock.__code__,
        stock.__globals__ | names,
        stock.__name__,
        stock.__defaults__,
        stock.__closure__,
    )
    copy.__kwdefaults__ = stock.__kwdefaults__
    return copy


def activate(activation: Activation, y: jax.Array) -> jax.Array:
    """Apply an activation to what has been computed and rounded."""
    if activation is None:
        return y
    if isinstance(activation, str):
        return _activations.activate(y, activation, y.dtype.name)
    return activation(y)


@dataclass
class Sum:
    """A convolution to which stock code is about to add a bias: act(conv + bias) comes of that."""

    lhs: jax.Array
    rhs: jax.Array
    convolve: Callable[..., jax.Array]
    """Of lhs and rhs."""
    convolve_and_finish: Callable[..., jax.Array]
    """Of lhs, rhs, bias and, by name, the activation."""
    activation: str
    axis: int
    """That of the output's channels."""

    @cached_property
    def output(self) -> jax.ShapeDtypeStruct:
        """What the convolution alone gives."""
        return jax.eval_shape(self.convolve, self.lhs, self.rhs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a bias, so that stock code which spreads one leaves it as small as it is."""
        return tuple(
            size if axis == self.axis else 1 for axis, size in enumerate(self.output.shape)
        )

    @property
    def ndim(self) -> int:
        """The number of dimensions, as of an array."""
        return self.lhs.ndim

    def __add__(self, bias: jax.Array) -> jax.Array:
        if (bias.shape, bias.dtype) == (self.shape, self.output.dtype):
            return self.compute(bias.reshape(-1))
        return activate(self.activation, self.convolve(self.lhs, self.rhs) + bias)

    def compute(self, bias: jax.Array | None) -> jax.Array:
        """Compute all of it by one call."""
        return self.convolve_and_finish(self.lhs, self.rhs, bias, activation=self.activation)


@dataclass
class Convolution:
    """What stock code gets when it asks, once, for a convolution.

    Attributes:
        activation: what follows.
        biased: whether stock code adds a bias to what it gets.
        joins: whether it does so before anything else, so that the activation may follow at once.
        numbers: the dimension numbers, if they are not those that stock code gives.
        function: what to call instead of ours, if the user has something else.
        joined: whether the activation is part of what stock code got.
    """

    activation: Activation
    biased: bool
    joins: bool = True
    numbers: lax.ConvDimensionNumbers | None = None
    function: Callable[..., jax.Array] | None = None
    joined: bool = False

    def conv_general_dilated(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        window_strides: Any,
        padding: Any,
        *,
        dimension_numbers: Any = None,
        out_sharding: Any = None,
        **others: Any,
    ) -> Any:
        """Convolve in the place of `lax.conv_general_dilated`."""
        function = self.function or conv_general_dilated
        joins = self.function is None and out_sharding is None
        if out_sharding is not None:
            others["out_sharding"] = out_sharding
        others |= {"window_strides": window_strides, "padding": padding}
        others["dimension_numbers"] = self.numbers or dimension_numbers
        return self._compute(lhs, rhs, function, conv_bias_act if joins else None, 1, others)

    def conv_transpose(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        strides: Any,
        padding: Any,
        *,
        dimension_numbers: Any = None,
        **others: Any,
    ) -> Any:
        """Convolve in the place of `lax.conv_transpose`."""
        others |= {"strides": strides, "padding": padding}
        others["dimension_numbers"] = self.numbers or dimension_numbers
        return self._compute(lhs, rhs, conv_transpose, conv_transpose_bias_act, -1, others)

    def _compute(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        convolve: Callable[..., jax.Array],
        convolve_and_finish: Callable[..., jax.Array] | None,
        axis: int,
        arguments: dict[str, Any],
    ) -> Any:
        """Convolve, or put it off; `axis` is that of channels where there are no numbers."""
        name = self.activation
        if not (self.joins and isinstance(name, str) and convolve_and_finish):
            return convolve(lhs, rhs, **arguments)
        self.joined = True
        if arguments["dimension_numbers"] is not None:
            numbers = arguments["dimension_numbers"]
            axis = lax.conv_dimension_numbers(lhs.shape, rhs.shape, numbers).out_spec[1]
        total = Sum(
            lhs,
            rhs,
            partial(convolve, **arguments),
            partial(convolve_and_finish, **arguments),
            name,
            axis % lhs.ndim,
        )
        return total if self.biased else total.compute(None)

    def lax(self) -> Any:
        """Give `lax` with our convolutions, for code that has its own from there."""
        return View(
            lax,
            conv_general_dilated=self.conv_general_dilated,
            conv_transpose=self.conv_transpose,
        )

    def finish(self, output: jax.Array) -> jax.Array:
        """Apply the activation to what stock code returned, if that is still to be done."""
        return output if self.joined else activate(self.activation, output)
