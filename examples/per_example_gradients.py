# SPDX-License-Identifier: Apache-2.0
"""Train on scikit-learn's digits with the gradient of each example clipped, and noise added.

    pip install ".[examples]"
    python examples/per_example_gradients.py --check

That is differentially private SGD (Abadi et al., CCS 2016, https://arxiv.org/abs/1607.00133). The
gradients of the examples come of `jax.vmap(jax.grad(...))`. Its forward pass is that of the batch;
the gradients of a filter, one for each example, are one convolution in groups. How much privacy the
noise buys is for an accountant to say, who would also want batches drawn independently, and not in
turn.

It exits with 1 if `--check` finds that the examples' gradients do not add up to the batch's, or if
the test accuracy stays below `--min-accuracy`.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcudnn
import steps
from train_digits import BATCH, CLASSES, SIDE, Data, batches, load

Params = dict[str, dict[str, jax.Array]]

# The filter of each layer, (out, height, width, in), and its stride. Few parameters are best here:
# each gets noise of its own. The last window covers all that is left of an image.
LAYERS = {
    "first": ((16, 3, 3, 1), 2, "SAME"),
    "second": ((32, 3, 3, 16), 2, "SAME"),
    "head": ((CLASSES, 2, 2, 32), 1, "VALID"),
}


class State(NamedTuple):
    """What a step changes."""

    params: Params
    optimizer: Any
    key: jax.Array
    norms: jax.Array  # of the last batch's gradients, before they were clipped


def init(key: jax.Array) -> Params:
    """Give every layer a float32 weight and a zero bias."""
    draw = jax.nn.initializers.he_normal(in_axis=3, out_axis=0)
    params = {}
    for name, (shape, _, _) in LAYERS.items():
        key, subkey = jax.random.split(key)
        params[name] = {"weight": draw(subkey, shape), "bias": jnp.zeros(shape[0])}
    return params


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Return logits (n, 10) of images (n, 8, 8, 1)."""
    y = images
    for name, (_, stride, padding) in LAYERS.items():
        y = jaxcudnn.conv_bias_act(
            y,
            params[name]["weight"],
            params[name]["bias"],
            activation=None if name == "head" else "relu",
            window_strides=(stride, stride),
            padding=padding,
            dimension_numbers=("NHWC", "OHWI", "NHWC"),
        )
    return y.reshape(-1, CLASSES)


def loss_fn(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of some images."""
    y = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(y, labels).mean()


def per_example(params: Params, batch: Data) -> tuple[jax.Array, Params]:
    """Return the loss (n,) and the gradient of each example, with a leading axis of n."""

    def of_one(image: jax.Array, label: jax.Array) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(loss_fn)(params, image[None], label[None])

    return jax.vmap(of_one)(jnp.asarray(batch.images), jnp.asarray(batch.labels))


def clip(gradients: Params, limit: float) -> tuple[Params, jax.Array]:
    """Shorten each example's gradient to `limit`, and add them up; return the norms (n,), too."""
    norms = jax.vmap(optax.tree.norm)(gradients)
    factors = jnp.minimum(1, limit / norms)
    return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), gradients), norms


def add_noise(key: jax.Array, gradient: Params, deviation: float) -> Params:
    """Add independent normal noise to every number."""
    leaves, structure = jax.tree.flatten(gradient)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        g + deviation * jax.random.normal(k, g.shape) for k, g in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)


def check(params: Params, batch: Data) -> bool:
    """Compare the mean of the examples' gradients with the gradient of the mean loss."""
    with jax.default_matmul_precision("highest"):  # TF32 would hide small faults
        _, each = jax.jit(per_example)(params, batch)
        whole = jax.jit(jax.grad(loss_fn))(params, *batch)
    mean = jax.tree.map(lambda g: g.mean(0), each)
    apart, bound = steps.distance(mean, whole), steps.relu_bound(len(LAYERS), BATCH * SIDE * SIDE)
    print("Mean of the examples' gradients against the batch's: relative difference", end=" ")
    print(f"{apart:.1e}; rounding allows {bound:.1e}")
    return apart <= bound


def train(args: argparse.Namespace, data: Data) -> Params:
    """Train with Adam on clipped and noisy gradients; return the parameters."""
    total = args.epochs * (len(data.labels) // BATCH)
    optimizer = optax.adam(optax.cosine_decay_schedule(args.learning_rate, total))

    def step(state: State, batch: Data) -> tuple[State, jax.Array]:
        losses, gradients = per_example(state.params, batch)
        clipped, norms = clip(gradients, args.clip)
        key, subkey = jax.random.split(state.key)
        noisy = add_noise(subkey, clipped, args.noise * args.clip)
        gradient = jax.tree.map(lambda g: g / BATCH, noisy)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, optimizer_state, key, norms), losses.mean()  # pyright: ignore

    key, subkey = jax.random.split(jax.random.key(args.seed))
    params = init(subkey)
    state = State(params, optimizer.init(params), key, jnp.zeros(BATCH))
    rng = np.random.default_rng(args.seed)
    stream = (batch for _ in range(args.epochs) for batch in batches(data, rng))
    run = steps.run(step, state, stream, total)
    norms = np.asarray(run.state.norms)
    print(f"Training: {run}")
    low, middle, high = np.quantile(norms, (0, 0.5, 1))
    print(
        f"Norms of the last batch's gradients: {low:.2g} to {high:.2g}, median {middle:.2g};",
        end=" ",
    )
    print(f"{np.mean(norms > args.clip):.0%} were clipped to {args.clip:g}")
    return run.state.params


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train privately on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument(
        "--clip", type=float, default=1.0, help="the longest gradient of an example"
    )
    parser.add_argument("--noise", type=float, default=0.5, help="its deviation, as part of --clip")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--check", action="store_true", help="first compare with a batch's gradient"
    )
    parser.add_argument("--min-accuracy", type=float, default=0.85, help="exit with 1 below this")
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {args.epochs}")
    if not (args.clip > 0 and math.isfinite(args.clip)):
        parser.error(f"--clip must be positive and finite, got {args.clip:g}")
    if not (args.noise >= 0 and math.isfinite(args.noise)):
        parser.error(f"--noise must be finite and not negative, got {args.noise:g}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Check and train; return 0, or 1 if gradients or accuracy are not as they should be."""
    args = parse(argv)
    train_data, test_data = load(np.dtype(np.float32), args.seed)
    if args.check:
        batch = next(batches(train_data, np.random.default_rng(args.seed)))
        if not check(init(jax.random.key(args.seed)), batch):
            print("Wrong gradients.", file=sys.stderr)
            return 1
    params = train(args, train_data)
    read = logits(params, jnp.asarray(test_data.images)).argmax(1)
    right = np.asarray(read) == test_data.labels
    return steps.judge(right, args.min_accuracy)


if __name__ == "__main__":
    sys.exit(main())
