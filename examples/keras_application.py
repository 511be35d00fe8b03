# SPDX-License-Identifier: Apache-2.0
"""Run a model of `keras.applications`, forward and backward, with cuDNN's convolutions and without.

    pip install ".[examples,keras]"
    python examples/keras_application.py ResNet50

Keras runs on JAX and knows nothing of this package: `jaxcudnn.installed()` is all there is to it.
The weights are random, and nothing is downloaded. It prints how many convolutions of a training
step cuDNN takes, and how far loss and gradients are from those that XLA computes by itself. It
exits with 1 if rounding does not explain that.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"  # which Keras reads when it is imported

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

import jaxcudnn
import steps


def loss_of(model: Any) -> Callable[..., jax.Array]:
    """Return the loss of a model as a function of its variables, images and labels."""

    def loss(trained: list, others: list, images: jax.Array, labels: jax.Array) -> jax.Array:
        predicted, _ = model.stateless_call(trained, others, images, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(predicted, labels).mean()

    return loss


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Run a model of keras.applications on cuDNN.")
    parser.add_argument("name", nargs="?", default="ResNet50", help="of a keras.applications model")
    parser.add_argument("--size", type=int, default=128, help="pixels along each edge of an image")
    parser.add_argument("--batch", type=int, default=16, help="images of a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not isinstance(getattr(keras.applications, args.name, None), Callable):
        models = [name for name in dir(keras.applications) if name[0].isupper()]
        parser.error(f"name must be one of {', '.join(models)}, got {args.name}")
    for name in ("size", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the model both ways; return 0, or 1 if the results differ by more than rounding."""
    args = parse(argv)
    keras.utils.set_random_seed(args.seed)
    shape = args.size, args.size, 3
    model = getattr(keras.applications, args.name)(
        weights=None, input_shape=shape, classes=10, classifier_activation=None
    )
    rng = np.random.default_rng(args.seed)
    arguments = (
        [variable.value for variable in model.trainable_variables],
        [variable.value for variable in model.non_trainable_variables],
        jnp.asarray(rng.standard_normal((args.batch, *shape), np.float32)),
        jnp.asarray(rng.integers(0, 10, args.batch)),
    )
    step = jax.jit(jax.value_and_grad(loss_of(model)))

    def timed(name: str) -> Any:
        start = time.perf_counter()
        result = jax.block_until_ready(step(*arguments))
        first, start = time.perf_counter() - start, time.perf_counter()
        jax.block_until_ready(step(*arguments))
        print(f"{name}: first step {first:.1f} s, the next ", end="")
        print(f"{1e3 * (time.perf_counter() - start):.1f} ms; loss {float(result[0]):.4f}")
        return result

    with jax.default_matmul_precision("highest"):  # TF32 would hide small faults
        stock = timed("XLA")
        with jaxcudnn.installed():
            found = jaxcudnn.explain(step)(*arguments)
            (device,) = arguments[2].devices()
            print(f"Convolutions of a step of {args.name}, on {device.device_kind}:", end=" ")
            print(steps.implementation(step.lower(*arguments)))
            ours = timed("installed()")
    convolutions = sum(row.count for row in found)
    taken = sum(row.count for row in found if row.route != "lax")
    print(f"On CUDA, cuDNN takes {taken} of the {convolutions} convolutions of a step")
    apart = steps.distance(ours, stock)
    bound = steps.relu_bound(convolutions // 3 + 1, args.batch * args.size**2)
    print(f"Loss and gradients: relative difference {apart:.1e}; rounding allows {bound:.1e}")
    if not apart <= bound:
        print("More than rounding.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
