# SPDX-License-Identifier: Apache-2.0
"""Haiku's convolutions, computed by cuDNN on CUDA devices, with an activation if one is asked for.

Each class is the one of the same name in `haiku`, with its arguments, parameters and names, and one
argument more:

    activation: what is applied to the output, bias included: None; 'relu', 'relu6', 'leaky_relu',
        'gelu' (exact), 'gelu_tanh', 'silu', 'elu', 'softplus', 'tanh' or 'sigmoid', computed
        together with convolution and bias by `jaxcudnn.conv_bias_act`; or any function.

Raises, beside what `haiku` raises: ValueError for an unknown name, TypeError for what is neither a
name nor a function.

Example:
    >>> import haiku as hk
    >>> import jax
    >>> from jaxcudnn.haiku import Conv2D
    >>> net = hk.transform(lambda x: Conv2D(16, 3, activation="relu")(x))
    >>> x = jax.numpy.ones((8, 32, 32, 3))
    >>> net.apply(net.init(jax.random.key(0), x), None, x).shape
    (8, 32, 32, 16)
"""

from typing import Any

import jax
from jax import lax

from . import _modules
from ._modules import Activation, Convolution, with_names

_modules.require("haiku", "dm-haiku", "haiku")

import haiku as hk  # noqa: E402


class ConvND(hk.ConvND):
    """`haiku.ConvND`, and an activation."""

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `haiku.ConvND`, or of the subclass, and `activation`."""
        super().__init__(*args, **kwargs)
        self.activation: Activation = _check(self, activation)

    def __call__(self, inputs: jax.Array, *, precision: lax.Precision | None = None) -> jax.Array:
        """Compute what `haiku.ConvND` does, and the activation."""
        convolution = Convolution(self.activation, biased=self.with_bias)
        stock = with_names(hk.ConvND.__call__, lax=convolution.lax())
        return convolution.finish(stock(self, inputs, precision=precision))


class Conv1D(ConvND, hk.Conv1D):
    """`haiku.Conv1D`, and an activation."""


class Conv2D(ConvND, hk.Conv2D):
    """`haiku.Conv2D`, and an activation."""


class Conv3D(ConvND, hk.Conv3D):
    """`haiku.Conv3D`, and an activation."""


class ConvNDTranspose(hk.ConvNDTranspose):
    """`haiku.ConvNDTranspose`, and an activation."""

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `haiku.ConvNDTranspose`, or of the subclass, and `activation`."""
        super().__init__(*args, **kwargs)
        self.activation: Activation = _check(self, activation)

    def __call__(self, inputs: jax.Array, *, precision: lax.Precision | None = None) -> jax.Array:
        """Compute what `haiku.ConvNDTranspose` does, and the activation."""
        convolution = Convolution(self.activation, biased=self.with_bias)
        stock = with_names(hk.ConvNDTranspose.__call__, lax=convolution.lax())
        return convolution.finish(stock(self, inputs, precision=precision))


class Conv1DTranspose(ConvNDTranspose, hk.Conv1DTranspose):
    """`haiku.Conv1DTranspose`, and an activation."""


class Conv2DTranspose(ConvNDTranspose, hk.Conv2DTranspose):
    """`haiku.Conv2DTranspose`, and an activation."""


class Conv3DTranspose(ConvNDTranspose, hk.Conv3DTranspose):
    """`haiku.Conv3DTranspose`, and an activation."""


class _Depthwise(hk.Module):
    """What our depthwise convolutions share; Haiku's own share a class that is not public."""

    num_spatial_dims: int
    channel_index: int
    with_bias: bool

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of the class in `haiku`, and `activation`."""
        super().__init__(*args, **kwargs)
        self.activation: Activation = _check(self, activation)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Compute what the class in `haiku` does, and the activation."""
        # With channels first, Haiku gives the bias a shape that is one of two dimensions.
        joins = not self.with_bias or self.channel_index == -1 or self.num_spatial_dims == 2
        convolution = Convolution(self.activation, biased=self.with_bias, joins=joins)
        stock = with_names(hk.DepthwiseConv2D.__call__, lax=convolution.lax())
        return convolution.finish(stock(self, inputs))


class DepthwiseConv1D(_Depthwise, hk.DepthwiseConv1D):
    """`haiku.DepthwiseConv1D`, and an activation."""


class DepthwiseConv2D(_Depthwise, hk.DepthwiseConv2D):
    """`haiku.DepthwiseConv2D`, and an activation."""


class DepthwiseConv3D(_Depthwise, hk.DepthwiseConv3D):
    """`haiku.DepthwiseConv3D`, and an activation."""


# Left out of haiku.__all__, it seems by mistake: Haiku's documentation has it.
_Separable = hk.SeparableDepthwiseConv2D  # pyright: ignore[reportPrivateImportUsage]


class SeparableDepthwiseConv2D(_Separable):
    """`haiku.SeparableDepthwiseConv2D`, and an activation after its second convolution."""

    def __init__(self, *args: Any, activation: Activation = None, **kwargs: Any):
        """Take the arguments of `haiku.SeparableDepthwiseConv2D`, and `activation`."""
        stock = with_names(_Separable.__init__, DepthwiseConv2D=DepthwiseConv2D)
        stock(self, *args, **kwargs)
        self.activation: Activation = _check(self, activation)
        self._conv2.activation = activation


def _check(module: hk.Module, activation: Activation) -> Activation:
    return _modules.check_activation(f"haiku.{type(module).__name__}", activation)
