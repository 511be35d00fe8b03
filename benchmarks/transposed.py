# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions of known networks, and PyTorch as the peer that computes them too."""

import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from convolutions import Conv
from device_time import Event, fastest, step_time

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from cases import Case
from reported import Reported

TORCH_SECONDS = 150
"""How long PyTorch may take for all layers."""

# Each as the forward convolution whose input gradient it is: its positions and `c` are those of
# the transposed convolution's output, and `k` is the channels of its input.
HIFI_GAN = (
    Conv("HiFi-GAN 16/8 32 512-256", 16, (256,), 256, 512, 16, 8, padding=4),
    Conv("HiFi-GAN 16/8 256 256-128", 16, (2048,), 128, 256, 16, 8, padding=4),
    Conv("HiFi-GAN 4/2 4096 64-32", 16, (8192,), 32, 64, 4, 2, padding=1),
)
"""The upsampling layers of version 1, for 16 segments of 8192 samples."""

DCGAN = (
    Conv("DCGAN 4x4/2 4 512-256", 128, (8, 8), 256, 512, 4, 2, padding=1),
    Conv("DCGAN 4x4/2 16 128-64", 128, (32, 32), 64, 128, 4, 2, padding=1),
)
"""Two layers of the generator, for 128 images of 64x64."""

U_NET = (
    Conv("U-Net 2x2/2 28 1024-512", 8, (56, 56), 512, 1024, 2, 2),
    Conv("U-Net 2x2/2 128 128-64", 8, (256, 256), 64, 128, 2, 2),
)
"""The first and the last layer that doubles the image."""

U_NET_3D = (
    Conv("3-D U-Net 2x2x2/2 8 320-256", 2, (16, 16, 16), 256, 320, 2, 2),
    Conv("3-D U-Net 2x2x2/2 16 256-128", 2, (32, 32, 32), 128, 256, 2, 2),
    Conv("3-D U-Net 2x2x2/2 32 128-64", 2, (64, 64, 64), 64, 128, 2, 2),
)
"""Layers that double a volume."""

LAYERS = (*HIFI_GAN, *DCGAN, *U_NET, *U_NET_3D)
DTYPES = ("bfloat16", "float32")


def transposed(conv: Conv, dtype: str) -> Reported:
    """Give the transposed convolution, with arrays that cuDNN takes as they are."""
    rank = len(conv.spatial)
    case = Case(
        conv.name, conv.batch, conv.c, conv.k, conv.spatial, (conv.window,) * rank,
        ((conv.padding, conv.padding),) * rank, (conv.stride,) * rank, (1,) * rank, 1,
        conv.dimension_numbers,
    )  # fmt: skip
    return Reported(conv.name, case, dtype, dtype, transposed=True)


def line_name(conv: Conv, dtype: str) -> str:
    """Name a layer in one dtype."""
    return f"{conv.name} {dtype}"


def torch_layer(conv: Conv, dtype: str) -> dict[str, Any]:
    """Describe a layer to torch_peer.py."""
    shapes = {role: (n, c, *spatial) for role, (n, *spatial, c) in conv.shapes().items()}
    return {
        "name": line_name(conv, dtype),
        "dtype": dtype,
        "stride": conv.stride,
        "padding": conv.padding,
        "input": shapes["y"],
        "filter": shapes["w"],
        "output": shapes["x"],
    }


def torch_times(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Time layers in a process that has PyTorch.

    Returns:
        "version"; "us", microseconds by name and pass, the faster form's where there are two; and
        "faults", a list of what went wrong.
    """
    if importlib.util.find_spec("torch") is None:
        return {"version": None, "us": {}, "faults": ["PyTorch is not installed"]}
    script = Path(__file__).with_name("torch_peer.py")
    faults = []
    try:
        ran = subprocess.run(
            [sys.executable, str(script)], input=json.dumps(layers), capture_output=True,
            text=True, timeout=TORCH_SECONDS,
        )  # fmt: skip
        text = ran.stdout
        if ran.returncode:
            faults.append(
                f"PyTorch's process ended with status {ran.returncode}: {ran.stderr[-500:]}"
            )
    except subprocess.TimeoutExpired as expired:
        text = (expired.stdout or b"").decode()
        faults.append(f"PyTorch took more than {TORCH_SECONDS} s")
    return parse(text.splitlines(), faults)


def parse(lines: Iterable[str], faults: list[str]) -> dict[str, Any]:
    """Read what torch_peer.py printed; a last line may be cut short."""
    version, us = None, defaultdict(dict)
    for text in lines:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if "version" in line:
            version = line["version"]
        elif "error" in line:
            faults.append(f"PyTorch, {line['name']} {line['pass']}: {line['error'][:300]}")
        else:
            turns = ([Event(*visit) for visit in turn] for turn in line["turns"])
            best = fastest(step_time(turn, line["steps"]) for turn in turns).microseconds
            of_layer = us[line["name"]]
            of_layer[line["pass"]] = min(best, of_layer.get(line["pass"], best))
    return {"version": version, "us": dict(us), "faults": faults}
