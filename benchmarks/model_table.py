# SPDX-License-Identifier: Apache-2.0
"""The networks whose training steps are timed: what they are given, and how large they are.

jax_models.py and torch_models.py have the networks themselves, by the same names and arguments.
This module imports neither library, since no process may hold both.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

IMPLEMENTATIONS = {"stock": 150, "installed": 100, "torch": 100, "torch.compile": 240}
"""What computes a network, and the seconds that a process may take: JAX as it is, JAX under
`jaxcudnn.install()`, PyTorch step by step, and PyTorch's compiler."""

BY_DEFAULT = ("stock", "installed", "torch")


class Effort(NamedTuple):
    """How often to repeat."""

    warm: int = 3
    steps: int = 10
    repeats: int = 3
    """Of those steps, by the clock on the wall."""
    traced_steps: int = 5
    turns: int = 2
    """Of those steps, under a profiler, after one that may have missed some."""


QUICK = Effort(warm=1, steps=3, repeats=1, traced_steps=2, turns=1)


@dataclass(frozen=True)
class Size:
    """A network's arguments, and the shapes of what it is given for each example."""

    batch: int
    inputs: tuple[int, ...]
    """Channels last."""
    targets: tuple[int, ...]
    """Of the labels if the network classifies, else of the numbers that it should give."""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A network and how it is trained."""

    title: str
    optimizer: str
    """"sgd" with momentum, "adam" or "adamw"."""
    parameters: int
    full: Size
    small: Size
    """The same kind of network, of a size that takes a CPU seconds."""
    classes: int = 0
    """0 for a network that gives numbers, of which the mean absolute difference is the loss."""

    def size(self, *, small: bool) -> Size:
        """Give what is to be run."""
        return self.small if small else self.full

    def arguments(self, *, small: bool) -> dict[str, Any]:
        """Give the arguments of the network, in either library."""
        classes = {"classes": self.classes} if self.classes else {}
        return self.size(small=small).arguments | classes


def images(batch: int, size: int, **arguments: Any) -> Size:
    """Give a classifier's size."""
    return Size(batch, (size, size, 3), (), arguments)


def volumes(batch: int, size: int, **arguments: Any) -> Size:
    """Give the size of a network that classifies each point of a volume with four channels."""
    return Size(batch, (size,) * 3 + (4,), (size,) * 3, arguments)


def sounds(batch: int, frames: int, **arguments: Any) -> Size:
    """Give the size of a network that makes 256 samples of each frame of 80 numbers."""
    return Size(batch, (frames, 80), (256 * frames,), arguments)


MODELS = {
    "resnet50": Model(
        "ResNet-50, 256x224x224x3",
        "sgd",
        25_557_032,
        images(256, 224, width=64, depths=(3, 4, 6, 3)),
        images(2, 32, width=8, depths=(1, 1)),
        classes=1000,
    ),
    "convnext_t": Model(
        "ConvNeXt-T, 128x224x224x3",
        "adamw",
        28_589_128,
        images(128, 224, widths=(96, 192, 384, 768), depths=(3, 3, 9, 3)),
        images(2, 32, widths=(8, 16), depths=(1, 1)),
        classes=1000,
    ),
    "unet3d": Model(
        "3-D U-Net, 4x96x96x96x4",
        "adam",
        7_925_284,
        volumes(4, 96, channels=(32, 64, 128, 256)),
        volumes(1, 8, channels=(4, 8)),
        classes=4,
    ),
    "hifi_gan": Model(
        "HiFi-GAN-like decoder, 32x128x80",
        "adam",
        3_555_649,
        sounds(32, 128, channels=256, windows=(3, 7, 11), dilations=(1, 3, 5)),
        sounds(2, 4, channels=16, windows=(3,), dilations=(1, 2)),
    ),
    "mobilenet_v2": Model(
        "MobileNetV2, 256x224x224x3",
        "sgd",
        3_504_872,
        images(
            256,
            224,
            stages=(
                # expansion, channels, blocks, stride of the first
                (1, 16, 1, 1),
                (6, 24, 2, 2),
                (6, 32, 3, 2),
                (6, 64, 4, 2),
                (6, 96, 3, 1),
                (6, 160, 3, 2),
                (6, 320, 1, 1),
            ),
        ),
        images(2, 32, stages=((1, 8, 1, 1), (2, 16, 2, 2))),
        classes=1000,
    ),
}
