# SPDX-License-Identifier: Apache-2.0
"""The networks of model_table.py in Flax, which knows nothing of this package.

Arrays are channels-last, and parameters float32. torch_models.py has the same networks, with their
layers in the same order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Layer = Callable[[jax.Array], jax.Array]


def in_dtype_of_input(module: Callable[..., nn.Module], **defaults: Any) -> Callable[..., Layer]:
    """Give what makes layers of a kind: they compute in the dtype of what they are given."""

    def make(*shape: Any, **options: Any) -> Layer:
        return lambda x: module(*shape, dtype=x.dtype, **defaults | options)(x)

    return make


conv = in_dtype_of_input(nn.Conv)
conv_transpose = in_dtype_of_input(nn.ConvTranspose)
dense = in_dtype_of_input(nn.Dense)
layer_norm = in_dtype_of_input(nn.LayerNorm, epsilon=1e-6)
batch_norm = in_dtype_of_input(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5)


class Bottleneck(nn.Module):
    """Three convolutions, of which the second looks at neighbours and strides."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        outputs = 4 * self.width
        y = nn.relu(batch_norm()(conv(self.width, (1, 1), use_bias=False)(x)))
        y = conv(self.width, (3, 3), self.stride, padding=1, use_bias=False)(y)
        y = nn.relu(batch_norm()(y))
        y = batch_norm()(conv(outputs, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = batch_norm()(conv(outputs, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Residual network (He et al., 2015, https://arxiv.org/abs/1512.03385).

    Strides are in the windows of three, as in the version that is called 1.5.
    """

    width: int
    depths: Sequence[int]
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(batch_norm()(conv(self.width, (7, 7), 2, padding=3, use_bias=False)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        for stage, depth in enumerate(self.depths):
            for block in range(depth):
                x = Bottleneck(self.width << stage, 2 if stage and not block else 1)(x)
        return dense(self.classes)(x.mean((1, 2)))


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, and two layers at each point by itself."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = layer_norm()(conv(width, (7, 7), padding=3, feature_group_count=width)(x))
        y = dense(width)(nn.gelu(dense(4 * width)(y), approximate=False))
        scale = self.param("scale", nn.initializers.ones, (width,)).astype(x.dtype)
        return x + y * jnp.expand_dims(scale, (0, 1, 2))


class ConvNeXt(nn.Module):
    """ConvNeXt (Liu et al., 2022, https://arxiv.org/abs/2201.03545), without stochastic depth."""

    widths: Sequence[int]
    depths: Sequence[int]
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for stage, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            if stage:
                x = conv(width, (2, 2), 2, padding=0)(layer_norm()(x))
            else:
                x = layer_norm()(conv(width, (4, 4), 4, padding=0)(x))
            for _ in range(depth):
                x = ConvNeXtBlock()(x)
        return dense(self.classes)(layer_norm()(x.mean((1, 2))))


class UNet3D(nn.Module):
    """3-D U-Net: halves a volume by strided convolutions, doubles it by transposed ones.

    At each size there are two convolutions on the way down and two on the way up, which see what
    those on the way down made (Cicek et al., 2016, https://arxiv.org/abs/1606.06650). There is no
    normalisation.
    """

    channels: Sequence[int]
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(channels: int, x: jax.Array, stride: int = 1) -> jax.Array:
            return nn.relu(conv(channels, (3, 3, 3), stride, padding=1)(x))

        kept = []
        for channels in self.channels:
            if kept:
                x = layer(channels, x, stride=2)
            x = layer(channels, layer(channels, x))
            kept.append(x)
        kept.pop()
        for channels in self.channels[-2::-1]:
            up = conv_transpose(channels, (2, 2, 2), (2, 2, 2))
            x = jnp.concatenate([nn.relu(up(x)), kept.pop()], axis=-1)
            x = layer(channels, layer(channels, x))
        return conv(self.classes, (1, 1, 1))(x)


class HifiGan(nn.Module):
    """The generator of HiFi-GAN (Kong et al., 2020, https://arxiv.org/abs/2010.05646).

    Four transposed convolutions make 256 samples of each frame, and after each of them residual
    blocks with dilated windows of several sizes are averaged.
    """

    channels: int
    windows: Sequence[int]
    dilations: Sequence[int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        leaky = partial(nn.leaky_relu, negative_slope=0.1)
        x = conv(self.channels, (7,))(x)
        for stage, stride in enumerate((8, 8, 2, 2)):
            channels = self.channels >> (stage + 1)
            up = conv_transpose(channels, (2 * stride,), (stride,))
            x, total = up(leaky(x)), jnp.zeros((), x.dtype)
            for window in self.windows:
                y = x
                for dilation in self.dilations:
                    z = conv(channels, (window,), kernel_dilation=dilation)(leaky(y))
                    y = y + conv(channels, (window,))(leaky(z))
                total = total + y
            x = total / len(self.windows)
        return jnp.tanh(conv(1, (7,))(leaky(x)))[..., 0]


class MobileNetV2(nn.Module):
    """MobileNetV2 (Sandler et al., 2018, https://arxiv.org/abs/1801.04381)."""

    stages: Sequence[tuple[int, int, int, int]]
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(channels: int, window: int, x: jax.Array, stride: int = 1, groups: int = 1):
            made = conv(
                channels, (window, window), stride, padding=window // 2,
                feature_group_count=groups, use_bias=False,
            )  # fmt: skip
            return batch_norm()(made(x))

        x = nn.relu6(layer(32, 3, x, stride=2))
        for expansion, channels, blocks, first_stride in self.stages:
            for block in range(blocks):
                stride = 1 if block else first_stride
                inner = expansion * x.shape[-1]
                y = x if expansion == 1 else nn.relu6(layer(inner, 1, x))
                y = nn.relu6(layer(inner, 3, y, stride, groups=inner))
                y = layer(channels, 1, y)
                x = x + y if x.shape == y.shape else y
        x = nn.relu6(layer(1280, 1, x))
        return dense(self.classes)(x.mean((1, 2)))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet50": ResNet,
    "convnext_t": ConvNeXt,
    "unet3d": UNet3D,
    "hifi_gan": HifiGan,
    "mobilenet_v2": MobileNetV2,
}
