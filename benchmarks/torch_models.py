# SPDX-License-Identifier: Apache-2.0
"""The networks of model_table.py in PyTorch: those of jax_models.py, in the same order.

Arrays are channels-first in name and channels-last in memory. PyTorch has no such memory format for
one spatial dimension, so that networks of one dimension also come with two, one of them of size 1.
"""

from collections.abc import Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Any) -> Any:
        return F.relu(self.branch(x) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width: int, depths: Sequence[int], classes: int):
        super().__init__()
        stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        layers = [stem, nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * width << stage
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x).mean((2, 3)))


class LayerNorm(nn.LayerNorm):
    """Normalises channels, which are the last dimension in memory."""

    def forward(self, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.pointwise = nn.Sequential(
            nn.LayerNorm(width, 1e-6), nn.Linear(width, 4 * width), nn.GELU(),
            nn.Linear(4 * width, width),
        )  # fmt: skip
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        y = self.pointwise(self.depthwise(x).permute(0, 2, 3, 1)) * self.scale
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, widths: Sequence[int], depths: Sequence[int], classes: int):
        super().__init__()
        layers: list[nn.Module] = []
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage:
                before = widths[stage - 1]
                layers += [LayerNorm(before, 1e-6), nn.Conv2d(before, width, 2, 2)]
            else:
                layers += [nn.Conv2d(3, width, 4, 4), LayerNorm(width, 1e-6)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1], 1e-6)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.layers(x).mean((2, 3))))


class UNet3D(nn.Module):
    def __init__(self, channels: Sequence[int], classes: int):
        super().__init__()

        def layer(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
            return nn.Sequential(nn.Conv3d(inputs, outputs, 3, stride, 1), nn.ReLU(True))

        self.down, self.up, self.merge = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        before = 4
        for stage, width in enumerate(channels):
            layers = []
            if stage:
                layers.append(layer(before, width, 2))
                before = width
            layers += [layer(before, width), layer(width, width)]
            self.down.append(nn.Sequential(*layers))
            before = width
        for width in channels[-2::-1]:
            up = nn.Sequential(nn.ConvTranspose3d(before, width, 2, 2), nn.ReLU(True))
            self.up.append(up)
            self.merge.append(nn.Sequential(layer(2 * width, width), layer(width, width)))
            before = width
        self.head = nn.Conv3d(before, classes, 1)

    def forward(self, x: Any) -> Any:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


class HifiGan(nn.Module):
    def __init__(
        self, channels: int, windows: Sequence[int], dilations: Sequence[int], lifted: bool = False
    ):
        super().__init__()
        self.lifted = lifted

        def conv(inputs: int, outputs: int, window: int, dilation: int = 1) -> nn.Module:
            padding = dilation * (window // 2)
            if lifted:
                return nn.Conv2d(
                    inputs, outputs, (1, window), padding=(0, padding), dilation=(1, dilation)
                )
            return nn.Conv1d(inputs, outputs, window, padding=padding, dilation=dilation)

        def up(inputs: int, outputs: int, stride: int) -> nn.Module:
            if lifted:
                return nn.ConvTranspose2d(
                    inputs, outputs, (1, 2 * stride), (1, stride), (0, stride // 2)
                )
            return nn.ConvTranspose1d(inputs, outputs, 2 * stride, stride, stride // 2)

        self.first = conv(80, channels, 7)
        self.ups, self.stages = nn.ModuleList(), nn.ModuleList()
        for stride in (8, 8, 2, 2):
            self.ups.append(up(channels, channels // 2, stride))
            channels //= 2
            blocks = nn.ModuleList()
            for window in windows:
                pairs = nn.ModuleList()
                for dilation in dilations:
                    first = conv(channels, channels, window, dilation)
                    pairs.append(nn.ModuleList([first, conv(channels, channels, window)]))
                blocks.append(pairs)
            self.stages.append(blocks)
        self.last = conv(channels, 1, 7)

    def forward(self, x: Any) -> Any:
        x = self.first(x.unsqueeze(2) if self.lifted else x)
        for up, blocks in zip(self.ups, self.stages, strict=True):
            x, total = up(F.leaky_relu(x, 0.1)), 0
            for pairs in blocks:  # pyright: ignore[reportGeneralTypeIssues]
                y = x
                for dilated, plain in pairs:
                    y = y + plain(F.leaky_relu(dilated(F.leaky_relu(y, 0.1)), 0.1))
                total = total + y
            x = total / len(blocks)  # pyright: ignore[reportArgumentType]
        return torch.tanh(self.last(F.leaky_relu(x, 0.1))).flatten(1)


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int):
        super().__init__()
        inner = expansion * inputs
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += normalised(inputs, inner, 1)
        layers += normalised(inner, inner, 3, stride, groups=inner)
        layers += normalised(inner, outputs, 1)[:-1]
        self.layers = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Any) -> Any:
        y = self.layers(x)
        return x + y if self.is_residual else y


def normalised(
    inputs: int, outputs: int, window: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution, its normalisation and ReLU6."""
    conv = nn.Conv2d(inputs, outputs, window, stride, window // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU6(True)]


class MobileNetV2(nn.Module):
    def __init__(self, stages: Sequence[tuple[int, int, int, int]], classes: int):
        super().__init__()
        layers, before = normalised(3, 32, 3, 2), 32
        for expansion, channels, blocks, stride in stages:
            for block in range(blocks):
                layers.append(InvertedResidual(before, channels, expansion, 1 if block else stride))
                before = channels
        layers += normalised(before, 1280, 1)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(1280, classes)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x).mean((2, 3)))


NETWORKS: dict[str, Any] = {
    "resnet50": ResNet,
    "convnext_t": ConvNeXt,
    "unet3d": UNet3D,
    "hifi_gan": HifiGan,
    "mobilenet_v2": MobileNetV2,
}
