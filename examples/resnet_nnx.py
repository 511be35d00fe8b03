# SPDX-License-Identifier: Apache-2.0
"""Train a small residual network of Flax's NNX on scikit-learn's handwritten digits.

    pip install ".[examples,flax]"
    python examples/resnet_nnx.py --check

Its convolutions are `jaxcudnn.flax.Conv`, which take their ReLU along and store filters as cuDNN
reads them. It exits with 1 if `--check` finds other gradients than with `lax`, or if the test
accuracy stays below `--min-accuracy`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxcudnn
import steps
from jaxcudnn.flax import Conv
from train_digits import BATCH, CLASSES, SIDE, Data, batches, load

Convolution = Callable[..., jax.Array]


class Block(nnx.Module):
    """Add to the input what two convolutions make of it, at half its size if that is asked for.

    What they make is normalised once, at the end, so that nothing stands between the first
    convolution and its ReLU, and both are one call of cuDNN.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, **options):
        shape = inputs, outputs
        self.first = Conv(*shape, (3, 3), stride, activation="relu", **options)
        self.second = Conv(outputs, outputs, (3, 3), use_bias=False, **options)
        dtype, rngs = options["dtype"], options["rngs"]
        self.norm = nnx.BatchNorm(outputs, momentum=0.9, dtype=dtype, rngs=rngs)
        same = stride == 1 and inputs == outputs
        self.skip = nnx.data(
            None if same else Conv(*shape, (1, 1), stride, use_bias=False, **options)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        branch = self.norm(self.second(self.first(x)))
        return jax.nn.relu(branch + (x if self.skip is None else self.skip(x)))


class ResNet(nnx.Module):
    """Three stages of blocks, each with twice the channels and half the pixels of the last."""

    def __init__(self, width: int, blocks: int, dtype: str, conv: Convolution, rngs: nnx.Rngs):
        options = {
            "filter_layout": "OHWI",
            "conv_general_dilated": conv,
            "dtype": jnp.dtype(dtype),  # to compute in; parameters are float32
            "rngs": rngs,
        }
        self.stem = Conv(1, width, (3, 3), activation="relu", **options)
        made, channels = [], width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                made.append(Block(channels, width << stage, stride, **options))
                channels = width << stage
        self.blocks = nnx.List(made)
        self.head = nnx.Linear(channels, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Return float32 logits (n, 10) of images (n, 8, 8, 1)."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.astype(jnp.float32).mean((1, 2)))


def make(args: argparse.Namespace, conv: Convolution, dtype: str) -> ResNet:
    """Make the model of the command line."""
    key = jax.random.key(args.seed, impl="rbg")  # which compiles fast on every platform
    return ResNet(args.width, args.blocks, dtype, conv, nnx.Rngs(key))


def loss_fn(model: ResNet, batch: Data) -> jax.Array:
    """Return the mean cross-entropy of a batch."""
    logits = model(jnp.asarray(batch.images))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


def check(args: argparse.Namespace, batch: Data) -> bool:
    """Compare a step's float32 gradients with those taken with `lax`; say whether they agree."""

    def gradient(conv: Convolution) -> nnx.State:
        return nnx.jit(nnx.grad(loss_fn))(make(args, conv, "float32"), batch)

    with jax.default_matmul_precision("highest"):  # TF32 would hide small faults
        apart = steps.distance(
            gradient(jaxcudnn.conv_general_dilated), gradient(jax.lax.conv_general_dilated)
        )
    bound = steps.relu_bound(2 + 2 * 3 * args.blocks, BATCH * SIDE * SIDE)
    print(f"Gradients against lax: relative difference {apart:.1e}; rounding allows {bound:.1e}")
    return apart <= bound


def train(args: argparse.Namespace, data: Data) -> ResNet:
    """Train with AdamW, and return the trained model."""
    per_epoch = len(data.labels) // BATCH
    total = args.epochs * per_epoch
    schedule = optax.cosine_onecycle_schedule(total, 5e-3)
    model = make(args, jaxcudnn.conv_general_dilated, args.dtype)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-2), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state: nnx.State, batch: Data) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, gradient = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, gradient)
        return nnx.state((model, optimizer)), loss

    rng = np.random.default_rng(args.seed)
    stream = (batch for _ in range(args.epochs) for batch in batches(data, rng))
    run = steps.run(step, state, stream, total)
    print(f"Training: {run}")
    return nnx.merge(graph, run.state)[0]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small ResNet on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--check", action="store_true", help="first compare gradients with lax")
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit with 1 below this")
    args = parser.parse_args(argv)
    for name in ("epochs", "width", "blocks"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Check and train; return 0, or 1 if gradients or accuracy are not as they should be."""
    args = parse(argv)
    train_data, test_data = load(jnp.dtype(args.dtype), args.seed)
    if args.check:
        first = next(batches(train_data, np.random.default_rng(args.seed)))
        if not check(args, first._replace(images=first.images.astype(np.float32))):
            print("Wrong gradients.", file=sys.stderr)
            return 1
    model = train(args, train_data)
    model.eval()  # the means that batch normalisation has gathered
    logits = nnx.jit(lambda model, images: model(images))(model, jnp.asarray(test_data.images))
    right = np.asarray(logits).argmax(1) == test_data.labels
    return steps.judge(right, args.min_accuracy)


if __name__ == "__main__":
    sys.exit(main())
