# SPDX-License-Identifier: Apache-2.0
"""Train a decoder of audio, in the manner of HiFi-GAN, to rebuild tones from their spectra.

    pip install ".[examples]"
    python examples/audio_decoder.py

The decoder is the generator of HiFi-GAN (Kong et al., NeurIPS 2020, https://arxiv.org/abs/2010.05646)
without the discriminators: four transposed convolutions make 256 samples of each frame, and after
each of them residual blocks with dilated windows of three sizes are averaged. Convolution, bias,
residual and activation are one call of `jaxcudnn.conv_bias_act`. The defaults, 32 x 128 frames of
80 numbers, are for a GPU; on a CPU try `--batch 4 --frames 16 --channels 32`. The tones are drawn,
and nothing is downloaded. It exits with 1 if the loss has not fallen.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcudnn
import steps

RATE, BANDS = 22050, 80  # samples a second; numbers for each frame
STRIDES = (8, 8, 2, 2)
HOP = math.prod(STRIDES)  # samples for each frame
LAYOUTS = ("NWC", "OWI", "NWC")
TRANSPOSED_LAYOUTS = ("NWC", "IWO", "NWC")  # cuDNN reads such filters where they lie
WINDOWS = (256, 1024)  # of the spectra that are compared

Params = dict[str, dict[str, jax.Array]]


class Sounds(NamedTuple):
    """Frames (n, frames, 80), and the samples (n, 256 frames) that belong to them."""

    frames: np.ndarray
    samples: np.ndarray


class Network(NamedTuple):
    """What the network is like, beside its parameters."""

    channels: int
    sizes: tuple[int, ...]
    dilations: tuple[int, ...]
    activation: str


def shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Give the shape of each filter: (out, window, in), but (in, window, out) in `up`."""
    channels = network.channels
    made: dict[str, tuple[int, ...]] = {"first": (channels, 7, BANDS)}
    for stage, stride in enumerate(STRIDES):
        made[f"up {stage}"] = (channels, 2 * stride, channels // 2)
        channels //= 2
        for size in network.sizes:
            for dilation in network.dilations:
                for which in ("dilated", "plain"):
                    name = f"{which} {stage} {size} {dilation}"
                    made[name] = (channels, size, channels)
    return made | {"last": (1, 7, channels)}


def init(rng: np.random.Generator, network: Network) -> Params:
    """Give every layer a weight and a zero bias; the second of a residual block has a small one."""
    params = {}
    for name, shape in shapes(network).items():
        inputs, outputs = (shape[0], shape[2]) if name[:2] == "up" else (shape[2], shape[0])
        taps = 2 if name[:2] == "up" else shape[1]  # that reach one output
        scale = (0.1 if name[:5] == "plain" else 1) * math.sqrt(2 / (inputs * taps))
        weight = jnp.asarray(scale * rng.standard_normal(shape, np.float32))
        params[name] = {"weight": weight, "bias": jnp.zeros(outputs)}
    return params


def decode(params: Params, frames: jax.Array, network: Network) -> jax.Array:
    """Return samples (n, 256 frames) of frames (n, frames, 80), in their dtype."""

    def parameters(name: str) -> tuple[jax.Array, jax.Array]:
        layer = params[name]
        return layer["weight"].astype(frames.dtype), layer["bias"].astype(frames.dtype)

    def conv(name: str, x: jax.Array, act: str | None, dilation: int = 1, residual: Any = None):
        return jaxcudnn.conv_bias_act(
            x,
            *parameters(name),
            residual,
            act,
            padding="SAME",
            rhs_dilation=(dilation,),
            dimension_numbers=LAYOUTS,
        )

    x = conv("first", frames, network.activation)
    for stage, stride in enumerate(STRIDES):
        x = jaxcudnn.conv_transpose_bias_act(
            x,
            *parameters(f"up {stage}"),
            activation=network.activation,
            strides=(stride,),
            padding="SAME",
            dimension_numbers=TRANSPOSED_LAYOUTS,
        )
        blocks = []
        for size in network.sizes:
            y = x
            for dilation in network.dilations:
                block, act = f"{stage} {size} {dilation}", network.activation
                branch = conv(f"dilated {block}", y, act, dilation)
                y = conv(f"plain {block}", branch, act, residual=y)
            blocks.append(y)
        x = sum(blocks[1:], blocks[0]) / len(blocks)
    return conv("last", x, "tanh")[..., 0]


def spectrum(xp: Any, samples: Any, window: int) -> Any:
    """Return log magnitudes (n, times, window / 2 + 1), by NumPy or `jax.numpy` as `xp`."""
    starts = np.arange(0, samples.shape[1] - window + 1, window // 4)
    pieces = samples[:, starts[:, None] + np.arange(window)] * np.hanning(window).astype("float32")
    return xp.log(abs(xp.fft.rfft(pieces)) ** 2 + 1e-3) / 2


def draw(rng: np.random.Generator, count: int, frames: int, dtype: np.dtype) -> Sounds:
    """Draw tones of five harmonics with vibrato, and take the spectrum around each frame."""
    time = np.arange(frames * HOP, dtype=np.float32) / RATE
    pitch, depth, speed = (
        rng.uniform(*limits, (count, 1)).astype("float32")
        for limits in ((100, 800), (0, 0.5), (3, 8))
    )
    phase = 2 * np.pi * pitch * time + depth * np.sin(2 * np.pi * speed * time)
    harmonics = np.arange(1, 6, dtype=np.float32)
    loudness = rng.uniform(0, 1, (count, 1, 5)).astype("float32") / harmonics
    samples = 0.3 * (loudness * np.sin(harmonics * phase[..., None])).sum(-1)
    around = np.pad(samples, ((0, 0), (384, 384)))  # a window of 1024 has its frame in the middle
    spectra = spectrum(np, around, 4 * HOP)
    # Bands that are wider for higher frequencies, as the ear's are.
    edges = np.linspace(0, 1, BANDS + 1) ** 2 * (spectra.shape[-1] - BANDS) + np.arange(BANDS + 1)
    bands = np.add.reduceat(spectra, edges[:-1].astype(int), axis=-1)
    bands /= np.diff(edges.astype(int))
    return Sounds(bands.astype(dtype), samples.astype(np.float32))


def loss_fn(params: Params, batch: Sounds, network: Network) -> jax.Array:
    """Return the mean difference of log spectra: phases are free, as frames do not tell them."""
    made = decode(params, jnp.asarray(batch.frames), network).astype(jnp.float32)
    differences = [
        abs(spectrum(jnp, made, window) - spectrum(jnp, jnp.asarray(batch.samples), window)).mean()
        for window in WINDOWS
    ]
    return jnp.stack(differences).sum()


def train(args: argparse.Namespace) -> steps.Run:
    """Train with Adam, whose parameters are float32, on new tones in each step."""
    optimizer, rng = optax.adam(args.learning_rate), np.random.default_rng(args.seed)
    network = Network(args.channels, (*args.sizes,), (*args.dilations,), args.activation)
    params = init(rng, network)

    def step(state: Any, batch: Sounds) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, gradient = jax.value_and_grad(loss_fn)(params, batch, network)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), loss

    def batches() -> Iterator[Sounds]:
        for _ in range(args.steps):
            yield draw(rng, args.batch, args.frames, jnp.dtype(args.dtype))

    return steps.run(step, (params, optimizer.init(params)), batches(), args.steps)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a decoder of audio on synthetic tones.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="sounds of a step")
    parser.add_argument("--frames", type=int, default=128, help=f"of {HOP} samples, in each sound")
    parser.add_argument("--channels", type=int, default=256, help="before they are first halved")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[3, 7, 11], help="of windows of residual blocks"
    )
    parser.add_argument("--dilations", type=int, nargs="+", default=[1, 3, 5], help="of those")
    parser.add_argument(
        "--activation", choices=("relu", "leaky_relu", "silu"), default="relu", help="of all layers"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps must be at least 2, so that the loss can fall, got {args.steps}")
    if args.batch < 1:
        parser.error(f"--batch must be at least 1, got {args.batch}")
    if args.frames < 4:
        parser.error(f"--frames must be at least 4, one window of a spectrum, got {args.frames}")
    if args.channels < 16 or args.channels % 16:
        parser.error(f"--channels must be a multiple of 16, for four halves, got {args.channels}")
    for name in ("sizes", "dilations"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return 0, or 1 if the loss has not fallen."""
    args = parse(argv)
    run = train(args)
    seconds = args.batch * args.frames * HOP / RATE
    print(f"{seconds:.1f} s of sound in each step, {args.dtype}: {run}")
    if not run.losses[-1] < run.losses[0]:
        print("The loss has not fallen.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
