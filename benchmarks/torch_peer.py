# SPDX-License-Identifier: Apache-2.0
"""PyTorch's transposed convolutions and their gradients, timed by PyTorch's own profiler.

It reads a JSON list of layers from its standard input, each with the sizes of its arrays:

    {"name": ..., "dtype": "bfloat16", "stride": 2, "padding": 1,
     "input": [N, C, *positions], "filter": [C, K, *window], "output": [N, K, *positions]}

and prints a line of JSON for each pass: {"name", "pass", "steps", "turns"}, where a turn lists the
[name, start, duration] of every visit of the GPU's in `steps` steps, in nanoseconds. Arrays are
channels-last, cuDNN's benchmark mode is on and TF32 is allowed. PyTorch has no channels-last memory
format for one spatial dimension; there `conv_transpose1d` runs on contiguous arrays, and
`conv_transpose2d` on channels-last ones with a height of 1, a line of output for each.

It needs PyTorch, and must not share a process with JAX: each brings a profiler and a cuDNN.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

TURNS, STEPS = 2, 12


def main() -> None:
    """Time every layer that stands in the input."""
    torch: Any = importlib.import_module("torch")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    print(json.dumps({"version": torch.__version__}), flush=True)
    visits(torch, lambda: torch.ones(8, device="cuda").sum(), 1)  # the first trace may miss events
    for layer in json.load(sys.stdin):
        for which, step in passes(torch, layer):
            name = {"name": layer["name"], "pass": which}
            try:
                turns = [turn for place in (step(), step()) for turn in time(torch, place)]
            except Exception as error:
                print(json.dumps(name | {"error": f"{type(error).__name__}: {error}"}), flush=True)
                continue
            print(json.dumps(name | {"steps": STEPS, "turns": turns}), flush=True)


def passes(torch: Any, layer: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Give the passes of a layer; each makes its operands when called, and gives its step."""
    forms = [layer]
    if len(layer["input"]) == 3:
        lifted = {role: [*layer[role][:2], 1, *layer[role][2:]] for role in SHAPES}
        forms.append(layer | lifted)
    for form in forms:
        for which in ("fwd", "dgrad", "wgrad"):

            def make(form: dict[str, Any] = form, which: str = which) -> Callable[[], Any]:
                return prepare(torch, form, which)

            yield which, make


SHAPES = ("input", "filter", "output")


def prepare(torch: Any, layer: dict[str, Any], which: str) -> Callable[[], Any]:
    """Make a pass's operands and give the function of no arguments that computes it."""
    rank = len(layer["input"]) - 2
    memory = {2: torch.channels_last, 3: torch.channels_last_3d}.get(rank, torch.contiguous_format)

    def draw(role: str) -> Any:
        array = torch.randn(layer[role], device="cuda", dtype=getattr(torch, layer["dtype"]))
        return array.to(memory_format=memory)

    x, w, dy = map(draw, SHAPES)
    thin = rank == 2 and layer["filter"][2] == 1  # a height of 1, which is not strided
    stride = [1, layer["stride"]] if thin else [layer["stride"]] * rank
    padding = [0, layer["padding"]] if thin else [layer["padding"]] * rank
    if which == "fwd":
        function = getattr(torch.nn.functional, f"conv_transpose{rank}d")
        return lambda: function(x, w, stride=stride, padding=padding)
    mask = [which == "dgrad", which == "wgrad", False]
    backward = torch.ops.aten.convolution_backward
    return lambda: backward(dy, x, w, None, stride, padding, [1] * rank, True, [0] * rank, 1, mask)


def time(torch: Any, step: Callable[[], Any]) -> list[list[tuple[str, float, float]]]:
    """Warm up, then record what runs on the GPU in some turns."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return [visits(torch, step, STEPS) for _ in range(TURNS)]


def visits(torch: Any, step: Callable[[], Any], steps: int) -> list[tuple[str, float, float]]:
    """Record name, start and duration in nanoseconds of what runs on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return [
        (event.name[:120], event.time_range.start * 1e3, event.time_range.elapsed_us() * 1e3)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


if __name__ == "__main__":
    main()
