# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on scikit-learn's handwritten digits.

    pip install ".[examples]"
    python examples/train_digits.py --check

The 1,797 images come with scikit-learn: nothing is downloaded. The script is the same with and
without a GPU, and prints through which implementation the convolutions ran. It exits with 1 if
`--check` finds a wrong gradient or if the test accuracy stays below `--min-accuracy`.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.tree_util import keystr
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxcudnn
from steps import implementation, judge

SIDE, CLASSES, BATCH = 8, 10, 64

Params = dict[str, dict[str, jax.Array]]
Convolution = Callable[..., jax.Array]


# cuDNN reads images and filters of these layouts where they lie; others may cost a copy.
LAYOUTS = ("NHWC", "OHWI", "NHWC")
USUAL = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAYOUTS}

# The filter of each layer, (out, height, width, in / groups), and what is unusual about it.
LAYERS = {
    "stem": ((32, 3, 3, 1), {}),
    "depthwise": ((32, 3, 3, 1), {"feature_group_count": 32}),
    "pointwise": ((64, 1, 1, 32), {}),
    "strided": ((64, 3, 3, 64), {"window_strides": (2, 2)}),
    # This window covers the 4 x 4 pixels that are left, and so classifies the whole image.
    "head": ((CLASSES, 4, 4, 64), {"padding": "VALID"}),
}


class Data(NamedTuple):
    """Images (n, 8, 8, 1) with values from 0 to 1, and the digit that each shows."""

    images: np.ndarray
    labels: np.ndarray


def init(key: jax.Array) -> Params:
    """Give every layer a float32 weight and a zero bias."""
    draw = jax.nn.initializers.he_normal(in_axis=3, out_axis=0)
    params = {}
    for name, (shape, _) in LAYERS.items():
        key, subkey = jax.random.split(key)
        params[name] = {"weight": draw(subkey, shape), "bias": jnp.zeros((1, 1, 1, shape[0]))}
    return params


def logits(params: Params, images: jax.Array | np.ndarray, conv: Convolution) -> jax.Array:
    """Return float32 logits (n, 10). The convolutions compute in the dtype of the images."""
    y = jnp.asarray(images, jnp.float32)
    for name, (_, unusual) in LAYERS.items():
        x = (y if name == "stem" else jax.nn.silu(y)).astype(images.dtype)
        y = conv(x, params[name]["weight"].astype(images.dtype), **(USUAL | unusual))
        y = y.astype(jnp.float32) + params[name]["bias"]
    return y.reshape(-1, CLASSES)


def loss_fn(params: Params, batch: Data, conv: Convolution) -> jax.Array:
    """Return the mean cross-entropy of a batch."""
    y = logits(params, batch.images, conv)
    return optax.softmax_cross_entropy_with_integer_labels(y, batch.labels).mean()


def load(dtype: np.dtype, seed: int) -> tuple[Data, Data]:
    """Split the digits, class by class, into four fifths to train on and one fifth to test on."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(dtype).reshape(-1, SIDE, SIDE, 1)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=seed
    )
    return Data(images[train], labels[train]), Data(images[test], labels[test])


def batches(data: Data, rng: np.random.Generator) -> Iterator[Data]:
    """Yield full batches in random order, each image shifted by up to one pixel each way."""
    padded = np.pad(data.images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = np.lib.stride_tricks.sliding_window_view(padded, (SIDE, SIDE), axis=(1, 2))
    order = rng.permutation(len(data.labels))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        row, column = rng.integers(0, 3, size=(2, BATCH))
        yield Data(np.moveaxis(shifted[chosen, row, column], 1, 3), data.labels[chosen])


def gradient_bound(dtype: np.dtype) -> float:
    """Return how far apart, relatively, rounding alone can bring two gradients of the network.

    A sum of k products in float32 is off by about sqrt(k) eps(float32), in whatever order it is
    taken (Higham and Mary, SIAM J. Sci. Comput. 41, 2019); rounding it to `dtype` adds eps(dtype).
    The longest sums are a weight gradient's, with one term for each pixel of the batch. A gradient
    passes through every layer twice, forwards and backwards, and both sides of the comparison err.
    (A ReLU, unlike SiLU, would turn a rounding error next to zero into a step, and break this.)
    """
    accumulation = math.sqrt(BATCH * SIDE * SIDE) * jnp.finfo(jnp.float32).eps
    return float(2 * 2 * len(LAYERS) * (accumulation + jnp.finfo(dtype).eps))


def check(params: Params, batch: Data, conv: Convolution) -> bool:
    """Compare the gradients of a step taken with `conv`, a, with those taken with `lax`, b.

    Print the largest max|a - b| / max|b| of any parameter; return whether rounding explains it.
    """
    with jax.default_matmul_precision("highest"):  # TF32 would hide small faults
        gradient = jax.jit(jax.grad(loss_fn), static_argnums=2)
        ours = gradient(params, batch, conv)
        theirs = gradient(params, batch, jax.lax.conv_general_dilated)
    ratios = jax.tree.map(lambda a, b: abs(a - b).max() / abs(b).max(), ours, theirs)
    worst, where = max(
        (float(jnp.nan_to_num(ratio, nan=jnp.inf)), keystr(path, simple=True, separator=" "))
        for path, ratio in jax.tree.leaves_with_path(ratios)
    )
    bound = gradient_bound(batch.images.dtype)
    print(f"Gradients against lax: largest relative difference {worst:.1e} ({where}); ", end="")
    print(f"rounding allows {bound:.1e}")
    return worst <= bound


class History(NamedTuple):
    """What training leaves behind."""

    train_loss: np.ndarray  # (epochs, steps)
    test_loss: np.ndarray  # (epochs,)
    log_probabilities: np.ndarray  # (n, 10) of the test images, after the last epoch


def train(train_data: Data, test_data: Data, params: Params, epochs: int, seed: int) -> History:
    """Train with AdamW, and test after every epoch."""
    steps = epochs * (len(train_data.labels) // BATCH)
    optimizer = optax.adamw(optax.cosine_onecycle_schedule(steps, 5e-3), weight_decay=1e-2)

    def step(params, state, batch):
        loss, grad = jax.value_and_grad(loss_fn)(params, batch, jaxcudnn.conv_general_dilated)
        updates, state = optimizer.update(grad, state, params)
        return optax.apply_updates(params, updates), state, loss

    def log_probabilities(params, images):
        return jax.nn.log_softmax(logits(params, images, jaxcudnn.conv_general_dilated))

    rng, state = np.random.default_rng(seed), optimizer.init(params)
    lowered = jax.jit(step).lower(params, state, next(batches(train_data, rng)))
    (device,) = params["stem"]["weight"].devices()
    print(f"Convolutions of a step, on {device.device_kind}: {implementation(lowered)}")
    run, test = lowered.compile(), jax.jit(log_probabilities)  # run is what was just described

    train_loss, test_loss, tested = [], [], np.empty(0)
    for _ in (progress := tqdm(range(epochs), unit="epoch")):
        losses = []
        for batch in batches(train_data, rng):
            params, state, loss = run(params, state, batch)
            losses.append(loss)
        tested = np.asarray(test(params, test_data.images))
        train_loss.append(np.array(losses))
        test_loss.append(-tested[np.arange(len(tested)), test_data.labels].mean())
        accuracy = np.mean(tested.argmax(1) == test_data.labels)
        progress.set_postfix(loss=f"{train_loss[-1].mean():.3f}", test=f"{accuracy:.1%}")
    return History(np.array(train_loss), np.array(test_loss), tested)


INK, GREY, PALE, BLUE, RED = "#1f2937", "#6b7686", "#f1f4f8", "#2f62c9", "#d9482b"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": GREY,
    **{f"axes.spines.{side}": False for side in ("top", "right", "bottom", "left")},
    **{f"{axis}tick.{what}.size": 0 for axis in "xy" for what in ("major", "minor")},
    **{f"{axis}tick.color": GREY for axis in "xy"},
}


def draw_loss(axes: Axes, history: History) -> None:
    """Draw the training loss, for each step and averaged over each epoch, and the test loss."""
    epochs, steps = history.train_loss.shape
    ends = np.arange(1, epochs + 1)
    axes.plot(np.arange(1, epochs * steps + 1) / steps, history.train_loss.flat, BLUE, alpha=0.2)
    axes.plot(ends, history.train_loss.mean(1), BLUE, linewidth=2, label="training")
    axes.plot(ends, history.test_loss, RED, linewidth=2, label="test")
    axes.set(title="Cross-entropy", xlabel="epoch", xlim=(0, epochs), yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color="#e4e9f0")
    axes.legend(frameon=False, labelcolor="linecolor", loc="upper right")


def draw_confusion(axes: Axes, labels: np.ndarray, predicted: np.ndarray) -> None:
    """Draw how often each digit was read as which: blue where that is right, red where wrong."""
    counts, digits = np.zeros((CLASSES, CLASSES), int), np.arange(CLASSES)
    np.add.at(counts, (labels, predicted), 1)
    colours = np.where(np.eye(CLASSES), 1, -1) * (counts > 0)
    scale = ListedColormap([RED, PALE, BLUE])
    axes.pcolormesh(digits, digits, colours, cmap=scale, vmin=-1, vmax=1, edgecolor="w", lw=1.5)
    for written, read in np.argwhere(counts):
        axes.text(read, written, str(counts[written, read]), color="w", ha="center", va="center")
    axes.set(xlabel="read as", ylabel="written", xticks=digits, yticks=digits, aspect="equal")
    axes.set_title(f"{np.mean(labels == predicted):.1%} of {len(labels)} test digits read right")
    axes.set_anchor("N")
    axes.invert_yaxis()


def draw_digit(axes: Axes, image: np.ndarray, label: int, probabilities: np.ndarray) -> None:
    """Draw a test image, and below it what it was read as."""
    shades = LinearSegmentedColormap.from_list("", [PALE, INK])
    axes.imshow(image[..., 0].astype(np.float32), cmap=shades, vmin=0, vmax=1)
    axes.set(xticks=[], yticks=[], xlabel=f"{label}, {probabilities[label]:.0%} sure")
    if (read := probabilities.argmax()) != label:
        axes.set_xlabel(f"{label} read as {read}", color=RED)


def draw(path: Path, history: History, test_data: Data) -> None:
    """Write a PNG with the loss curves, the confusion matrix and the nine hardest digits."""
    images, labels = test_data
    probabilities = np.exp(history.log_probabilities)
    predicted, sure = probabilities.argmax(1), probabilities[np.arange(len(labels)), labels]
    hardest = np.lexsort((sure, predicted == labels))  # the misread ones first
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.8), layout="constrained")  # without pyplot: needs no display
        axes = figure.subplot_mosaic("LC012;LC345;LC678", width_ratios=(3.7, 3.6, 1, 1, 1))
        draw_loss(axes["L"], history)
        draw_confusion(axes["C"], labels, predicted)
        for place, i in enumerate(hardest[:9]):
            draw_digit(axes[str(place)], images[i], int(labels[i]), probabilities[i])
        axes["0"].set_title("Hardest to read")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=144, bbox_inches="tight", pad_inches=0.15)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--check", action="store_true", help="first compare gradients with lax")
    parser.add_argument("--min-accuracy", type=float, default=0.97, help="exit with 1 below this")
    parser.add_argument("--output", type=Path, default=Path("digits.png"), help="PNG to write")
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {args.epochs}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Check, train and draw; return 0, or 1 if gradients or accuracy are not as they should be."""
    args, start = parse(argv), time.perf_counter()
    train_data, test_data = load(jnp.dtype(args.dtype), args.seed)
    params = init(jax.random.key(args.seed))
    if args.check:
        batch = next(batches(train_data, np.random.default_rng(args.seed)))
        if not check(params, batch, jaxcudnn.conv_general_dilated):
            print("Wrong gradients.", file=sys.stderr)
            return 1
    history = train(train_data, test_data, params, args.epochs, args.seed)
    draw(args.output, history, test_data)
    right = history.log_probabilities.argmax(1) == test_data.labels
    seconds = time.perf_counter() - start
    remark = f" after {seconds:.0f} s; figure in {args.output}"
    return judge(right, args.min_accuracy, remark)


if __name__ == "__main__":
    sys.exit(main())
