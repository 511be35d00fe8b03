# SPDX-License-Identifier: Apache-2.0
"""Equinox's convolutions, computed by cuDNN on CUDA devices, with an activation if one is wanted.

Each class is the one of the same name in `equinox.nn`, with its arguments, fields and leaves, and
one argument more:

    activation: what is applied to the output, bias included: None; 'relu', 'relu6', 'leaky_relu',
        'gelu' (exact), 'gelu_tanh', 'silu', 'elu', 'softplus', 'tanh' or 'sigmoid', computed
        together with convolution and bias by `jaxcudnn.conv_bias_act`; or any function or module,
        which is then a part of the tree, as in `equinox.nn.MLP`.

Raises, beside what `equinox` raises: ValueError for an unknown name, TypeError for what is neither
a name nor callable.

Example:
    >>> import jax
    >>> from jaxcudnn.equinox import Conv2d
    >>> conv = Conv2d(3, 16, kernel_size=3, activation="relu", key=jax.random.key(0))
    >>> conv(jax.numpy.ones((3, 32, 32))).shape
    (16, 30, 30)
"""

from collections.abc import Callable
from typing import Any

import jax

from . import _modules
from ._modules import Activation, Convolution, View, with_names

_modules.require("equinox", "equinox", "equinox")

import equinox as eqx  # noqa: E402


class Conv(eqx.nn.Conv):
    """`equinox.nn.Conv`, and an activation."""

    activation_name: str | None = eqx.field(static=True)
    activation_function: Callable[[Any], Any] | None

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `equinox.nn.Conv`, and `activation`."""
        super().__init__(*args, **kwargs)
        self.activation_name, self.activation_function = _split(self, activation)

    @property
    def activation(self) -> Activation:
        """What is applied to the output."""
        return self.activation_name or self.activation_function

    @jax.named_scope("eqx.nn.Conv")
    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Compute what `equinox.nn.Conv` does, and the activation."""
        return _run(eqx.nn.Conv.__call__, self, x)


# Each class has its own __init__ because type checkers would make one of the fields.
class Conv1d(Conv, eqx.nn.Conv1d):
    """`equinox.nn.Conv1d`, and an activation."""

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `equinox.nn.Conv1d`, and `activation`."""
        super().__init__(*args, activation=activation, **kwargs)


class Conv2d(Conv, eqx.nn.Conv2d):
    """`equinox.nn.Conv2d`, and an activation."""

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `equinox.nn.Conv2d`, and `activation`."""
        super().__init__(*args, activation=activation, **kwargs)


class Conv3d(Conv, eqx.nn.Conv3d):
    """`equinox.nn.Conv3d`, and an activation."""

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `equinox.nn.Conv3d`, and `activation`."""
        super().__init__(*args, activation=activation, **kwargs)


class ConvTranspose(eqx.nn.ConvTranspose):
    """`equinox.nn.ConvTranspose`, and an activation."""

    activation_name: str | None = eqx.field(static=True)
    activation_function: Callable[[Any], Any] | None

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `equinox.nn.ConvTranspose`, and `activation`."""
        super().__init__(*args, **kwargs)
        self.activation_name, self.activation_function = _split(self, activation)

    @property
    def activation(self) -> Activation:
        """What is applied to the output."""
        return self.activation_name or self.activation_function

    @jax.named_scope("eqx.nn.ConvTranspose")
    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Compute what `equinox.nn.ConvTranspose` does, and the activation."""
        return _run(eqx.nn.ConvTranspose.__call__, self, x)


class ConvTranspose1d(ConvTranspose, eqx.nn.ConvTranspose1d):
    """`equinox.nn.ConvTranspose1d`, and an activation."""

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `equinox.nn.ConvTranspose1d`, and `activation`."""
        super().__init__(*args, activation=activation, **kwargs)


class ConvTranspose2d(ConvTranspose, eqx.nn.ConvTranspose2d):
    """`equinox.nn.ConvTranspose2d`, and an activation."""

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `equinox.nn.ConvTranspose2d`, and `activation`."""
        super().__init__(*args, activation=activation, **kwargs)


class ConvTranspose3d(ConvTranspose, eqx.nn.ConvTranspose3d):
    """`equinox.nn.ConvTranspose3d`, and an activation."""

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `equinox.nn.ConvTranspose3d`, and `activation`."""
        super().__init__(*args, activation=activation, **kwargs)


def _split(module: Conv | ConvTranspose, activation: Activation) -> tuple[Any, Any]:
    """Give a name, which is no leaf, and a function, which is one or has some."""
    _modules.check_activation(f"equinox.{type(module).__name__}", activation)
    return (activation, None) if isinstance(activation, str) else (None, activation)


def _run(call: Callable[..., Any], module: Conv | ConvTranspose, x: jax.Array) -> jax.Array:
    """Run the stock `__call__`, with the bias taken out if convolution and activation can be one.

    The stock code drops the batch dimension before it adds the bias, so that the bias has to come
    with the convolution.
    """
    joins = isinstance(module.activation, str)
    bias = None if module.bias is None else module.bias[None]
    convolution = Convolution(module.activation, biased=joins and bias is not None)

    def convolve(**arguments: Any) -> jax.Array:
        y = convolution.conv_general_dilated(**arguments)
        return y + bias if convolution.biased else y

    view = View(module, use_bias=module.use_bias and not joins)
    stock = with_names(call, lax=View(jax.lax, conv_general_dilated=convolve))
    return convolution.finish(stock(view, x))
