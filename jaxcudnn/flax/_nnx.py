# SPDX-License-Identifier: Apache-2.0
"""The modules of `flax.nnx`."""

import inspect
from typing import Any

import jax
from flax import nnx

from .. import _modules
from .._api import conv_general_dilated
from .._modules import Activation, Convolution, View, with_names
from . import _filters


class Conv(nnx.Conv):
    """`flax.nnx.Conv` by cuDNN, and an activation.

    Args:
        *args: those of `flax.nnx.Conv`.
        activation: see `jaxcudnn.flax`.
        filter_layout: see `jaxcudnn.flax`.
        **kwargs: those of `flax.nnx.Conv`. With another `conv_general_dilated` than ours the
            activation is applied to what that gives.

    Raises:
        ValueError: for an unknown activation or layout, and as `flax.nnx.Conv`.
        TypeError: for an activation that is neither a name nor callable.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jaxcudnn.flax import Conv
        >>> conv = Conv(3, 16, (3, 3), activation="relu", filter_layout="OHWI", rngs=nnx.Rngs(0))
        >>> conv(jnp.ones((8, 32, 32, 3))).shape, conv.kernel.shape
        ((8, 32, 32, 16), (16, 3, 3, 3))
    """

    def __init__(
        self,
        *args: Any,
        activation: Activation = None,
        filter_layout: str = "HWIO",
        **kwargs: Any,
    ):
        """Take the arguments of `flax.nnx.Conv`, and two more."""
        _modules.check_activation("flax.Conv", activation)
        _filters.check_layout("flax.Conv", filter_layout, _filters.CONV)
        kwargs.setdefault("conv_general_dilated", conv_general_dilated)
        super().__init__(*args, **_reordering(nnx.Conv, filter_layout, kwargs))
        self.kernel_shape: tuple[int, ...] = self.kernel.shape
        self.activation: Activation = activation
        self.filter_layout: str = filter_layout

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Compute what `flax.nnx.Conv` does, and the activation."""
        function = self.conv_general_dilated
        convolution = Convolution(
            self.activation,
            biased=self.use_bias,
            numbers=_filters.dimension_numbers(self.filter_layout, len(self.kernel_size)),
            function=None if function is conv_general_dilated else function,
        )
        view = View(self, conv_general_dilated=convolution.conv_general_dilated)
        stock = inspect.unwrap(nnx.Conv.__call__)
        return convolution.finish(stock(view, inputs, out_sharding))


class ConvTranspose(nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose` by cuDNN, and an activation.

    Args:
        *args: those of `flax.nnx.ConvTranspose`.
        activation: see `jaxcudnn.flax`.
        filter_layout: see `jaxcudnn.flax`.
        **kwargs: those of `flax.nnx.ConvTranspose`.

    Raises:
        ValueError: for an unknown activation or layout, and as `flax.nnx.ConvTranspose`.
        TypeError: for an activation that is neither a name nor callable.
    """

    def __init__(
        self,
        *args: Any,
        activation: Activation = None,
        filter_layout: str = "HWIO",
        **kwargs: Any,
    ):
        """Take the arguments of `flax.nnx.ConvTranspose`, and two more."""
        _modules.check_activation("flax.ConvTranspose", activation)
        _filters.check_layout("flax.ConvTranspose", filter_layout, _filters.CONV_TRANSPOSE)
        super().__init__(*args, **_reordering(nnx.ConvTranspose, filter_layout, kwargs))
        self.kernel_shape: tuple[int, ...] = self.kernel.shape
        self.activation: Activation = activation
        self.filter_layout: str = filter_layout

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Compute what `flax.nnx.ConvTranspose` does, and the activation."""
        convolution = Convolution(
            self.activation,
            biased=self.use_bias,
            joins=self.padding != "CIRCULAR",  # which wraps the output before the bias comes
            numbers=_filters.dimension_numbers(self.filter_layout, len(self.kernel_size)),
        )
        stock = with_names(nnx.ConvTranspose.__call__, lax=convolution.lax())
        return convolution.finish(stock(self, inputs))


def _reordering(
    stock: type[nnx.Module], filter_layout: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Give the arguments with an initialiser of the kernel that has another order."""
    default = inspect.signature(stock.__init__).parameters["kernel_init"].default
    kernel_init = arguments.get("kernel_init", default)
    return arguments | {"kernel_init": _filters.initializer(kernel_init, filter_layout)}
