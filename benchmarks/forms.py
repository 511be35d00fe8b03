# SPDX-License-Identifier: Apache-2.0
"""In which form cuDNN computes a convolution the fastest: order, operation and dtype.

    python benchmarks/forms.py --output reports/forms.json

Plans are measured, with the default options, for every form in which a convolution can be given to
cuDNN: with arrays whose channels are last or first; an input gradient of stride 1 as itself or as a
forward convolution with the reversed filter; a depthwise filter gradient in its 16 bits or widened
to float32. It says which of them jaxcudnn tries first if the channels of all the user's arrays are
last (NHWC, OHWI), and if they are first. Copies that a form needs, transposes and conversions, are
not measured. Each section runs in a process of its own. It needs a GPU.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from command import measure as measure_sections
from command import options, run_in_process, tell_failures
from jax import lax
from machines import DryRun, Gpu, Machine
from record import Record

from jaxcudnn import _lowering, _route_reversed
from jaxcudnn._dtypes import Dtypes
from jaxcudnn._spec import ConvSpec, Layout

TIMEOUTS = {"depthwise": 300, "few_channels": 150, "input_gradients": 150, "large_windows": 120}
"""The sections in the order in which they run, and the seconds that each may take."""

ALL = ("fprop", "dgrad", "wgrad")
BITS_16 = ("float16", "bfloat16")
ORDERS = ("last", "first")


class Layer(NamedTuple):
    """A convolution with the same geometry in all dimensions."""

    batch: int
    c: int
    k: int
    spatial: tuple[int, ...]
    window: int
    dtypes: tuple[str, ...]
    ops: tuple[str, ...] = ALL
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    padding: int | None = None
    """On both sides; None for what keeps the size with a stride of 1 and an odd window."""

    def __str__(self) -> str:
        """Write images, channels, positions and window."""
        spatial = "x".join(map(str, self.spatial))
        window = "x".join([str(self.window)] * len(self.spatial))
        text = f"{self.batch}x{spatial}, {self.c}-{self.k}, {window}"
        for mark, number in (("/", self.stride), (" d", self.dilation), (" g", self.groups)):
            text += f"{mark}{number}" if number > 1 else ""
        return text

    def spec(self, dtype: str) -> ConvSpec:
        """Give what jaxcudnn's primitives are bound with."""
        rank = len(self.spatial)
        kept = self.dilation * (self.window - 1) // 2
        padding = kept if self.padding is None else self.padding
        return ConvSpec(
            x_shape=(self.batch, self.c, *self.spatial),
            w_shape=(self.k, self.c // self.groups, *[self.window] * rank),
            strides=(self.stride,) * rank,
            padding=((padding, padding),) * rank,
            dilation=(self.dilation,) * rank,
            groups=self.groups,
            flip=False,
            dtypes=Dtypes(dtype, dtype, dtype),
            precision=(lax.Precision.DEFAULT, lax.Precision.DEFAULT),
        )


def depthwise(batch: int, c: int, spatial: tuple[int, ...], window: int, dtype: str) -> Layer:
    """Give a convolution of each channel by itself."""
    return Layer(batch, c, c, spatial, window, (dtype,), groups=c)


def few(batch: int, c: int, k: int, spatial: tuple[int, ...], window: int) -> Layer:
    """Give a convolution from or to few channels."""
    return Layer(batch, c, k, spatial, window, ("float32", "bfloat16"))


def gradient(batch: int, c: int, k: int, spatial: tuple[int, ...], window: int, d: int) -> Layer:
    """Give a convolution whose input gradient is a forward convolution, too."""
    return Layer(
        batch, c, k, spatial, window, ("float32", "bfloat16", "float16"), ("dgrad",), dilation=d
    )


LAYERS: dict[str, tuple[Layer, ...]] = {
    "depthwise": (
        depthwise(32, 256, (62, 62), 3, "float32"),
        depthwise(32, 256, (62, 62), 3, "bfloat16"),
        depthwise(8, 104, (256, 256), 3, "float16"),
        depthwise(64, 96, (56, 56), 7, "bfloat16"),
        depthwise(32, 144, (56, 56), 3, "bfloat16")._replace(stride=2),
        depthwise(32, 240, (28, 28), 5, "float32"),
        depthwise(16, 512, (4096,), 4, "bfloat16"),
        depthwise(8, 64, (16, 32, 32), 3, "bfloat16"),
    ),
    "few_channels": (
        few(32, 3, 64, (224, 224), 7)._replace(stride=2),
        few(64, 1, 32, (64, 64), 3),
        few(16, 3, 3, (256, 256), 3),
        few(16, 64, 3, (128, 128), 3),
        few(4, 3, 32, (16, 64, 64), 3),
        few(32, 4, 64, (64, 64), 3),
        few(32, 8, 64, (64, 64), 3),
        few(64, 1, 64, (8192,), 9),
    ),
    "input_gradients": (
        gradient(32, 64, 64, (56, 56), 3, 1),
        gradient(32, 64, 64, (56, 56), 3, 2),
        gradient(32, 256, 256, (14, 14), 3, 1),
        gradient(16, 256, 256, (28, 28), 3, 4),
        gradient(32, 64, 64, (56, 56), 5, 1),
        gradient(32, 64, 256, (56, 56), 1, 1),
        gradient(32, 256, 64, (56, 56), 1, 1),
        gradient(4, 32, 32, (32, 32, 32), 3, 1),
        gradient(4, 32, 32, (32, 32, 32), 3, 2),
        gradient(16, 128, 128, (4096,), 5, 1),
        gradient(16, 128, 128, (4096,), 3, 3),
    ),
    "large_windows": (
        depthwise(64, 384, (32, 32), 31, "float32"),
        Layer(100, 1, 1, (530, 1430), 30, ("float32",), ("fprop",), padding=0),
    ),
}
"""The convolutions of each section."""


def forms(op: str, spec: ConvSpec) -> dict[str, dict[str, Any]]:
    """Name the forms of one pass, and say what a custom call would tell the extension."""
    operations = {op: (op, spec)}
    route = _route_reversed.fprop_of_dgrad(spec, layout(spec, "first")) if op == "dgrad" else None
    if route:
        operations["dgrad as fprop"] = ("fprop", route.spec)
    dtype = spec.dtype("x")
    dtypes = [dtype]
    if op == "wgrad" and spec.is_depthwise and dtype in BITS_16:
        dtypes.append("float32")
    return {
        f"{name}, channels {order}, {computed}": _lowering._attributes(*operation)
        | {"dtype": computed, "channels_first": order == "first"}
        for name, operation in operations.items()
        for computed in dtypes
        for order in ORDERS
    }


def layout(spec: ConvSpec, order: str) -> Layout:
    """Give the layout of images and filters whose channels are all last, or all first."""
    first = tuple(range(spec.num_spatial + 2))
    axes = first if order == "first" else (0, first[-1], *first[1:-1])
    return Layout(axes, axes, axes)


def preferred(op: str, spec: ConvSpec, order: str) -> dict[str, Any]:
    """Give the form that jaxcudnn tries first where all channels are last, or all first."""
    return next(_lowering._forms(op, spec, layout(spec, order))).attributes


def measure(machine: Machine, attributes: dict[str, Any]) -> dict[str, Any]:
    """Give the fastest plan of one form and its microseconds, and what finding it took."""
    start = time.perf_counter()
    candidates = machine.candidates(attributes)
    built = time.perf_counter()
    if not candidates:
        return {"plan": None}
    tuning = machine.tune(attributes)
    done = time.perf_counter()
    times = {t.name: t.microseconds for t in tuning.timings if not math.isnan(t.microseconds)}
    if tuning.plan.name not in times:
        reasons = dict.fromkeys(t.reason for t in tuning.timings)
        raise RuntimeError(f"no plan could be timed: {'; '.join(reasons)}")
    return {
        "plan": tuning.plan.name,
        "us": times[tuning.plan.name],
        "candidates": len(candidates),
        "timed": len(times),
        "build_ms": round(1e3 * (built - start), 1),
        "tune_ms": round(1e3 * (done - built), 1),
    }


def run_section(name: str, args: argparse.Namespace) -> None:
    """Run a section in a process of its own, where nothing is known from others."""
    run_in_process(__file__, name, args, TIMEOUTS[name], JAXCUDNN_STORE="off")


def work(name: str, args: argparse.Namespace) -> None:
    """Run a section in this process, and print a row as soon as it is measured."""
    record = Record(args.output, name, fresh=False)
    machine = DryRun() if args.dry_run else Gpu()
    record.environment(machine.environment())
    for layer in LAYERS[name][: 1 if args.quick else None]:
        for dtype in layer.dtypes:
            for op in layer.ops:
                measure_forms(machine, record, layer, op, dtype)
    record.finish()


def measure_forms(machine: Machine, record: Record, layer: Layer, op: str, dtype: str) -> None:
    """Measure all forms of one pass."""
    spec = layer.spec(dtype)
    choices = {order: preferred(op, spec, order) for order in ORDERS}
    print(f"{layer} {op} {dtype}", flush=True)
    for form, attributes in forms(op, spec).items():
        with record.attempt(f"{layer} {op} {form}"):
            row = {
                "layer": str(layer),
                "op": op,
                "dtype": dtype,
                "form": form,
                "chosen_for": [order for order in ORDERS if choices[order] == attributes],
                **measure(machine, attributes),
            }
            record.row(**row)
            print(f"  {line(row)}", flush=True)


def line(row: dict[str, Any]) -> str:
    """Say a row in a few words."""
    text = f"{row['form']}: "
    if row["plan"] is None:
        text += "no plan"
    else:
        text += (
            f"{row['us']:.1f} us by {row['plan']}, {row['timed']} of {row['candidates']} timed, "
            f"built in {row['build_ms']:.0f} ms, timed in {row['tune_ms']:.0f} ms"
        )
    layouts = " and ".join(row["chosen_for"])
    return text + (f"; chosen where channels are {layouts}" if layouts else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if anything could not be measured."""
    description = (__doc__ or "").split("\n")[0]
    args = options(description, Path("reports/forms.json"), [*TIMEOUTS]).parse_args(argv)
    if args.worker:
        work(args.worker, args)
        return 0
    return measure_sections(args, [*TIMEOUTS], run_section, tell_failures)


if __name__ == "__main__":
    sys.exit(main())
