# SPDX-License-Identifier: Apache-2.0
"""Train a 3-D U-Net of Equinox to segment ellipsoids in noise.

    pip install ".[examples,equinox]"
    python examples/unet3d_equinox.py
    python examples/unet3d_equinox.py --stock

The second run is the first with Equinox's own modules, so that XLA chooses the algorithms. Both
print how long the first step took and each of the others. The defaults are for a GPU; on a CPU try
`--size 16 --channels 8 16 --batch 2 --steps 50`. The volumes are drawn, and nothing is downloaded.
It exits with 1 if the loss has not fallen.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import cycle, islice, pairwise
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcudnn.equinox
import steps

# What is measured of each point, and what it may belong to: nothing, or an ellipsoid of a kind.
MODALITIES, CLASSES = 4, 4


class Volumes(NamedTuple):
    """Volumes (n, 4, size, size, size), and the class of each point (n, size, size, size)."""

    images: np.ndarray
    labels: np.ndarray


class Maker:
    """Makes the layers of a network: ours, or Equinox's with the activation after them."""

    def __init__(self, key: jax.Array, stock: bool):
        self.key, self.stock = key, stock

    def make(self, kind: str, *shape: int, relu: bool = True, **options: Any) -> Any:
        """Make a module of the kind, with (inputs, outputs, window)."""
        self.key, key = jax.random.split(self.key)
        if not self.stock:
            activation = "relu" if relu else None
            module = getattr(jaxcudnn.equinox, kind)
            return module(*shape, activation=activation, key=key, **options)
        layer = getattr(eqx.nn, kind)(*shape, key=key, **options)
        return eqx.nn.Sequential([layer, eqx.nn.Lambda(jax.nn.relu)]) if relu else layer

    def pair(self, inputs: int, outputs: int) -> eqx.nn.Sequential:
        """Make two convolutions that keep the size, and normalise what goes into them."""
        groups = eqx.nn.GroupNorm(min(8, inputs), inputs)
        first = self.make("Conv3d", inputs, outputs, 3, padding=1)
        return eqx.nn.Sequential(
            [groups, first, self.make("Conv3d", outputs, outputs, 3, padding=1)]
        )


class UNet(eqx.Module):
    """Halves a volume by strided convolutions, and doubles it again by transposed ones.

    At each size there are two convolutions on the way down and two on the way up, which see what
    the first two made.
    """

    stem: Any
    down: list[Any]
    up: list[Any]
    head: Any

    def __init__(self, channels: Sequence[int], stock: bool, key: jax.Array):
        maker = Maker(key, stock)
        self.stem = [
            maker.make("Conv3d", MODALITIES, channels[0], 3, padding=1),
            maker.pair(channels[0], channels[0]),
        ]
        self.down, self.up = [], []
        for fine, coarse in pairwise(channels):
            halve = maker.make("Conv3d", fine, coarse, 3, stride=2, padding=1)
            self.down.append([halve, maker.pair(coarse, coarse)])
            double = maker.make("ConvTranspose3d", coarse, fine, 2, stride=2)
            self.up.append([double, maker.pair(2 * fine, fine)])
        self.head = maker.make("Conv3d", channels[0], CLASSES, 1, relu=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (4, size, size, size) of one volume (4, size, size, size)."""
        kept = []
        for layer in self.stem:
            x = layer(x)
        for halve, pair in self.down:
            kept.append(x)
            x = pair(halve(x))
        for double, pair in reversed(self.up):
            x = pair(jnp.concatenate([double(x), kept.pop()]))
        return self.head(x)


def draw(rng: np.random.Generator, count: int, size: int, dtype: np.dtype) -> Volumes:
    """Draw two ellipsoids of each kind, which have a brightness of their own in each modality."""
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    points = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1)
    brightness = np.random.default_rng(0).normal(size=(CLASSES, MODALITIES)).astype(np.float32)
    images = np.empty((count, MODALITIES, size, size, size), dtype)
    labels = np.zeros((count, size, size, size), np.int32)
    for image, label in zip(images, labels, strict=True):
        for kind in (*range(1, CLASSES),) * 2:
            centre, radii = rng.uniform(-0.7, 0.7, 3), rng.uniform(0.2, 0.6, 3)
            scaled = (points - centre.astype(np.float32)) / radii.astype(np.float32)
            label[np.einsum("...i,...i", scaled, scaled) < 1] = kind
        clean = np.moveaxis(brightness[label], -1, 0)
        image[...] = clean + rng.standard_normal(clean.shape, np.float32) / 2
    return Volumes(images, labels)


def loss_fn(parameters: UNet, static: UNet, batch: Volumes) -> jax.Array:
    """Return the mean cross-entropy of a batch, of which the network computes in its dtype."""
    images = jnp.asarray(batch.images)
    model = eqx.combine(jax.tree.map(lambda p: p.astype(images.dtype), parameters), static)
    logits = jax.vmap(model)(images).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        jnp.moveaxis(logits, 1, -1), batch.labels
    )
    return losses.mean()


def train(args: argparse.Namespace) -> steps.Run:
    """Train with Adam, whose parameters are float32, on batches that are drawn before."""
    rng = np.random.default_rng(args.seed)
    drawn = [
        draw(rng, args.batch, args.size, jnp.dtype(args.dtype)) for _ in range(min(args.steps, 4))
    ]

    def make(key: jax.Array) -> UNet:
        return UNet(args.channels, args.stock, key)

    key = jax.random.key(args.seed, impl="rbg")  # which compiles fast on every platform
    model = eqx.filter_jit(make)(key)
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(args.learning_rate)

    def step(state: Any, batch: Volumes) -> tuple[Any, jax.Array]:
        parameters, moments = state
        loss, gradient = jax.value_and_grad(loss_fn)(parameters, static, batch)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(parameters, updates), moments), loss

    state = parameters, optimizer.init(parameters)
    return steps.run(step, state, islice(cycle(drawn), args.steps), args.steps)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a 3-D U-Net to segment ellipsoids.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4, help="volumes of a step")
    parser.add_argument("--size", type=int, default=96, help="points along each edge of a volume")
    parser.add_argument(
        "--channels", type=int, nargs="+", default=[32, 64, 128, 256], help="one for each size"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stock", action="store_true", help="use Equinox's own modules")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, so that the loss can fall, got {args.steps}")
    if args.batch < 1:
        parser.error(f"--batch must be at least 1, got {args.batch}")
    multiple = 1 << (len(args.channels) - 1)
    if args.size < 1 or args.size % multiple:
        parser.error(
            f"--size must be a positive multiple of {multiple}, since {len(args.channels)} numbers "
            f"of --channels halve it {len(args.channels) - 1} times, got {args.size}"
        )
    if any(c < 1 or c % min(8, c) for c in args.channels):
        parser.error(f"--channels must be multiples of 8, or less than 8, got {args.channels}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return 0, or 1 if the loss has not fallen."""
    args = parse(argv)
    run = train(args)
    print(f"{'Equinox' if args.stock else 'jaxcudnn'}, {args.dtype}, ", end="")
    print(f"{args.batch} volumes of {args.size}^3: {run}")
    if not run.losses[-1] < run.losses[0]:
        print("The loss has not fallen.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
