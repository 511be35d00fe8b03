# SPDX-License-Identifier: Apache-2.0
"""Whether routes are faster than cuDNN's plans: the rules of `jaxcudnn/_routes.py` rest on it.

    python benchmarks/routes.py --output reports/routes.json

Each convolution is computed by cuDNN's best plan, which is measured as by default, and by routes,
whether a rule takes them or not; the copies that a route makes count. Arrays are channels last, the
numbers normal. Device time by JAX's profiler, in turns, the least of some turns. Each section runs
in a process of its own and begins nothing new when its time is up; what it then has not measured it
lists. All of them take less than 150 s. It needs a GPU.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from command import measure as measure_sections
from command import options, run_in_process, tell_failures
from device_time import Program
from jax import lax
from machines import DryRun, Gpu, Machine
from record import Record

from jaxcudnn import Options, _primitives, _routes
from jaxcudnn._dtypes import Dtypes
from jaxcudnn._route_geometry import last
from jaxcudnn._spec import ROLES, ConvSpec

SECONDS = {"patches": 34, "stems": 30, "narrow": 22, "depthwise": 24, "large_windows": 26}
"""The sections in the order in which they run, and after how long each begins nothing new."""

GRACE = 12
"""Seconds that what was begun may take."""

ALL = ("fprop", "dgrad", "wgrad")
CUDNN = "cuDNN"


@dataclass(frozen=True)
class Layer:
    """A convolution with the same padding on both sides, channels last."""

    name: str
    batch: int
    c: int
    k: int
    spatial: tuple[int, ...]
    window: tuple[int, ...]
    routes: tuple[str, ...]
    stride: tuple[int, ...] | None = None
    """None for 1."""
    padding: tuple[tuple[int, int], ...] | None = None
    """None for none."""
    groups: int = 1
    dtype: str = "bfloat16"
    ops: tuple[str, ...] = ALL
    precision: lax.Precision = lax.Precision.DEFAULT

    def __str__(self) -> str:
        """Write name, sizes and dtype."""
        spatial, window = ("x".join(map(str, sizes)) for sizes in (self.spatial, self.window))
        text = f"{self.name}: {self.batch}x{spatial}, {self.c}-{self.k}, {window}"
        if self.stride:
            text += "/" + "x".join(map(str, self.stride))
        text += f" {self.dtype}"
        return text + " highest" * (self.precision == lax.Precision.HIGHEST)

    @property
    def spec(self) -> ConvSpec:
        """Give what jaxcudnn's primitives are bound with, for which no route is taken."""
        ones = (1,) * len(self.spatial)
        return ConvSpec(
            x_shape=(self.batch, self.c, *self.spatial),
            w_shape=(self.k, self.c // self.groups, *self.window),
            strides=self.stride or ones,
            padding=self.padding or ((0, 0),) * len(ones),
            dilation=ones,
            groups=self.groups,
            flip=False,
            dtypes=Dtypes(self.dtype, self.dtype, self.dtype),
            precision=(self.precision, self.precision),
            options=Options(routes=False),
        )

    def shrunk(self) -> "Layer":
        """Give a convolution of the same form that takes a CPU no time."""
        spatial = tuple(
            min(size, 2 * window) for size, window in zip(self.spatial, self.window, strict=True)
        )
        groups = min(self.groups, 4)
        c, k = (groups if self.groups > 1 else min(n, 4) for n in (self.c, self.k))
        return replace(self, batch=2, spatial=spatial, c=c, k=k, groups=groups)


def patches(name: str, batch: int, c: int, k: int, spatial: tuple[int, ...], size: int) -> Layer:
    """Give a convolution whose windows do not overlap."""
    sizes = (size,) * len(spatial)
    return Layer(name, batch, c, k, spatial, sizes, ("matmul",), stride=sizes)


def stem(
    name: str, batch: int, c: int, k: int, spatial: tuple[int, ...], window: int, stride: int,
    padding: int,
) -> Layer:  # fmt: skip
    """Give a strided convolution of few channels."""
    rank = len(spatial)
    return Layer(
        name, batch, c, k, spatial, (window,) * rank, ("space_to_depth",),
        stride=(stride,) * rank, padding=((padding, padding),) * rank,
    )  # fmt: skip


def depthwise(
    name: str, batch: int, c: int, spatial: tuple[int, ...], window: int, *routes: str
) -> Layer:
    """Give a convolution of each channel by itself that keeps the size."""
    rank, span = len(spatial), window - 1
    return Layer(
        name, batch, c, c, spatial, (window,) * rank, routes,
        padding=((span // 2, span - span // 2),) * rank, groups=c,
    )  # fmt: skip


def narrow(
    name: str, batch: int, c: int, k: int, spatial: tuple[int, ...], window: int, *ops: str
) -> Layer:
    """Give a convolution of few channels that keeps the size."""
    rank = len(spatial)
    return Layer(
        name, batch, c, k, spatial, (window,) * rank, ("blocks",),
        padding=((window // 2, window // 2),) * rank, ops=ops or ("fprop",),
    )  # fmt: skip


EMBEDDING = patches("patch embedding", 64, 3, 768, (224, 224), 16)
STEM = stem("ResNet", 128, 3, 64, (224, 224), 7, 2, 3)
AUDIO = depthwise("Mamba", 16, 512, (16384,), 4, "shifts")
AUDIO = replace(AUDIO, padding=((3, 0),))  # causal
LARGE = depthwise("RepLKNet", 64, 384, (32, 32), 31, "toeplitz", "fft")


def in_float32(layer: Layer, *ops: str) -> Layer:
    """Give the same layer in float32, TF32 allowed."""
    return replace(layer, dtype="float32", ops=ops or ALL)


def exactly(layer: Layer, *ops: str) -> Layer:
    """Give the same layer in float32 without TF32."""
    return replace(in_float32(layer, *ops), precision=lax.Precision.HIGHEST)


LAYERS: dict[str, tuple[Layer, ...]] = {
    "patches": (
        replace(EMBEDDING, routes=("matmul", "rounded matmul")),
        patches("few outputs", 4, 32, 4, (96, 96, 96), 1),
        patches("few inputs", 4, 4, 32, (96, 96, 96), 1),
        in_float32(EMBEDDING),
        patches("ConvNeXt", 128, 3, 96, (224, 224), 4),
        patches("ConvNeXt, second", 128, 96, 192, (56, 56), 2),
        patches("U-Net", 8, 64, 128, (256, 256), 2),
        patches("U-Net, deep", 8, 512, 1024, (56, 56), 2),
        patches("Swin UNETR", 4, 1, 48, (96, 96, 96), 2),
        replace(patches("1x1", 128, 64, 256, (56, 56), 1), ops=("fprop",)),
        replace(patches("1x1", 128, 1024, 256, (14, 14), 1), ops=("fprop", "dgrad")),
        in_float32(patches("1x1", 128, 64, 256, (56, 56), 1), "fprop", "wgrad"),
        exactly(EMBEDDING, "fprop", "wgrad"),
    ),
    "stems": (
        STEM,
        in_float32(STEM),
        stem("MobileNet", 128, 3, 32, (224, 224), 3, 2, 1),
        stem("HuBERT", 16, 1, 512, (80000,), 10, 5, 0),
        replace(stem("DCGAN", 512, 3, 64, (64, 64), 4, 2, 1), ops=("fprop", "dgrad")),
        replace(stem("AlexNet", 128, 3, 64, (224, 224), 11, 4, 2), ops=("fprop", "wgrad")),
        replace(stem("SegFormer", 64, 3, 64, (224, 224), 7, 4, 3), ops=("fprop", "wgrad")),
        stem("3-D", 4, 1, 64, (96, 96, 96), 7, 2, 3),
        exactly(STEM, "fprop"),
    ),
    "narrow": (
        narrow("VGG", 64, 3, 64, (224, 224), 3),
        narrow("3-D U-Net", 4, 4, 32, (96, 96, 96), 3),
        narrow("VAE", 8, 128, 3, (512, 512), 3, "dgrad"),
        narrow("3-D U-Net, second", 4, 32, 32, (96, 96, 96), 3),
        narrow("16 channels", 32, 16, 16, (256, 256), 3),
        replace(narrow("VGG", 64, 3, 64, (224, 224), 3), dtype="float16"),
        narrow("diffusion", 32, 4, 320, (64, 64), 3),
        narrow("one channel", 16, 1, 64, (512, 512), 3),
        narrow("7x7", 32, 3, 64, (128, 128), 7),
        narrow("audio", 16, 16, 16, (65536,), 7),
        narrow("32 channels", 32, 32, 32, (256, 256), 3),
        narrow("16-32 channels", 32, 16, 32, (256, 256), 3),
        narrow("8 channels", 32, 8, 8, (256, 256), 3),
        narrow("8-32 channels", 32, 8, 32, (256, 256), 3),
        narrow("32-8 channels", 32, 32, 8, (256, 256), 3),
        replace(narrow("16 channels", 32, 16, 16, (256, 256), 3), dtype="float16"),
        replace(narrow("3-D U-Net, second", 4, 32, 32, (96, 96, 96), 3), dtype="float16"),
        replace(narrow("one channel", 16, 1, 64, (512, 512), 3), dtype="float16"),
        replace(narrow("8-32 channels", 32, 8, 32, (256, 256), 3), dtype="float16"),
        in_float32(narrow("3-D U-Net", 4, 4, 32, (96, 96, 96), 3), "fprop"),
    ),
    "depthwise": (
        AUDIO,
        in_float32(AUDIO),
        replace(depthwise("Conformer", 16, 512, (2048,), 31, "shifts"), ops=("fprop", "wgrad")),
        depthwise("3x3", 32, 256, (62, 62), 3, "shifts"),
        replace(depthwise("ConvNeXt", 64, 96, (56, 56), 7, "shifts"), ops=("fprop", "dgrad")),
    ),
    "large_windows": (
        LARGE,
        in_float32(LARGE),
        replace(
            depthwise("RepLKNet, first", 32, 128, (64, 64), 31, "toeplitz", "fft"),
            ops=("fprop", "wgrad"),
        ),
        replace(
            depthwise("RepLKNet, last", 64, 1536, (8, 8), 13, "toeplitz"), ops=("fprop", "wgrad")
        ),
        replace(
            Layer("one channel", 100, 1, 1, (530, 1430), (30, 30), ("toeplitz", "fft")),
            dtype="float32", ops=("fprop",),
        ),
        exactly(LARGE, "fprop"),
    ),
}  # fmt: skip
"""The convolutions of each section, the more important ones first."""


def by_cudnn(a: jax.Array, b: jax.Array, *, op: str, spec: ConvSpec, layout: Any) -> jax.Array:
    """Compute a primitive, by no route."""
    first, second, _ = ROLES[op]
    return _primitives.compute({first: a, second: b}, spec=spec, layout=layout)


def functions(layer: Layer, op: str) -> dict[str, Callable[..., jax.Array]]:
    """Give cuDNN's computation of a pass, and those of the routes that there are for it."""
    described: dict[str, Any] = {"op": op, "spec": layer.spec, "layout": last(len(layer.spatial))}
    found: dict[str, Callable[..., jax.Array]] = {CUDNN: partial(by_cudnn, **described)}
    for name in layer.routes:
        kind = _routes.KINDS[name.split()[-1]]
        if kind.is_possible(op, layer.spec):
            compute = partial(kind.compute, convolve=by_cudnn, **described)
            found[name] = rounding(compute) if name.startswith("rounded") else compute
    return found


def rounding(compute: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Have matrix products ask for 16-bit results, instead of rounding sums in float32."""

    def computed(a: jax.Array, b: jax.Array) -> jax.Array:
        product = lax.dot_general
        lax.dot_general = lambda *args, **kwargs: product(
            *args, **kwargs | {"preferred_element_type": a.dtype}
        )
        try:
            return compute(a, b)
        finally:
            lax.dot_general = product

    return computed


def chosen(layer: Layer, op: str) -> str:
    """Name what jaxcudnn's rules take."""
    spec = replace(layer.spec, options=Options())
    return _routes.choose(op, spec, last(spec.num_spatial)) or CUDNN


def run_section(name: str, args: argparse.Namespace) -> None:
    """Run a section in a process of its own, where nothing is known from others."""
    run_in_process(__file__, name, args, SECONDS[name] + GRACE, JAXCUDNN_STORE="off")


def work(name: str, args: argparse.Namespace) -> None:
    """Run a section in this process, and print a row as soon as it is measured."""
    end = time.perf_counter() + SECONDS[name]
    record = Record(args.output, name, fresh=False)
    machine = DryRun() if args.dry_run else Gpu()
    record.environment(machine.environment())
    left = []
    for layer in LAYERS[name][: 1 if args.quick else None]:
        for op in layer.ops:
            if time.perf_counter() > end:
                left.append(f"{layer} {op}")
                continue
            with record.attempt(f"{layer} {op}"):
                row = {"layer": str(layer), "op": op, "chosen": chosen(layer, op)}
                record.row(**row, **measure(machine, machine.scaled(layer), op))
                print(f"  {line(record.rows[-1])}", flush=True)
    record.figures(not_begun=left)
    record.finish()


def measure(machine: Machine, layer: Layer, op: str) -> dict[str, Any]:
    """Time all computations of a pass, and say how far results are from cuDNN's."""
    keys = jax.random.split(jax.random.key(0), 2)
    operands = [
        jax.random.normal(key, last(len(layer.spatial)).to_array(role, layer.spec.shape(role)))
        .astype(layer.dtype)
        for key, role in zip(keys, ROLES[op][:2], strict=True)
    ]  # fmt: skip
    steps = {name: jax.jit(function) for name, function in functions(layer, op).items()}
    expected = steps[CUDNN](*operands)
    distance = jax.jit(_distance)
    apart = {name: float(distance(step(*operands), expected)) for name, step in steps.items()}
    programs = {name: Program(partial(step, *operands)) for name, step in steps.items()}
    times = machine.device_times(programs, rounds=2, steps=5)
    return {
        "us": {name: times[name].microseconds for name in steps},
        "apart": apart,
        "kernels": {
            name: [(each.name[:100], each.per_step, each.microseconds) for each in step.kernels]
            for name, step in times.items()
        },
    }


def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    """Give the largest difference over the largest number."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))


def line(row: dict[str, Any]) -> str:
    """Say a row in a few words."""
    us = row["us"]
    text = f"{row['layer']} {row['op']}: {CUDNN} {us[CUDNN]:.1f} us"
    for name, time_ in us.items():
        if name != CUDNN:
            text += f", {name} {time_:.1f} ({us[CUDNN] / time_:.2f}x, off {row['apart'][name]:.1e})"
    return f"{text}; chosen: {row['chosen']}"


def tell(sections: dict[str, Any], names: Sequence[str]) -> None:
    """Say what could not be measured, and what was not begun."""
    tell_failures(sections, names)
    for name in names:
        for text in sections[name]["figures"].get("not_begun", []):
            print(f"not begun, for want of time: {text}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if anything could not be measured."""
    description = (__doc__ or "").split("\n")[0]
    args = options(description, Path("reports/routes.json"), [*SECONDS]).parse_args(argv)
    if args.worker:
        work(args.worker, args)
        return 0
    return measure_sections(args, [*SECONDS], run_section, tell)


if __name__ == "__main__":
    sys.exit(main())
