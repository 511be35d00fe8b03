# SPDX-License-Identifier: Apache-2.0
"""Convolutions in PyTorch's words, and what PyTorch computes for them on the CPU.

`python tests/torch_convolutions.py` prints what data/torch_convolutions.json records, so that tests
can compare with it where PyTorch is not installed; with `--seeds START STOP` as much of other
random convolutions. Operands are small integers, so that all of it is exact. It needs PyTorch and
NumPy alone.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

RECORD = Path(__file__).parent / "data" / "torch_convolutions.json"
RECORDED_SEEDS = range(40)

Case = dict[str, Any]
"""Shapes of a and weight, whether there is a bias, and the other arguments by their names."""


def case(
    name: str,
    a: Sequence[int],
    weight: Sequence[int],
    *,
    bias: bool = True,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
) -> Case:
    return {
        "name": name, "a": a, "weight": weight, "bias": bias, "stride": stride, "padding": padding,
        "dilation": dilation, "transposed": transposed, "output_padding": output_padding,
        "groups": groups,
    }  # fmt: skip


def transposed(name: str, *shapes: Sequence[int], **arguments: Any) -> Case:
    return case(f"transposed-{name}", *shapes, transposed=True, **arguments)


CASES = [
    case("1d", [2, 3, 7], [4, 3, 3], padding=1),
    case("1d-lists-of-one", [2, 3, 9], [4, 3, 3], stride=[2], padding=[2], dilation=[2]),
    case("2d", [2, 3, 5, 6], [4, 3, 3, 2], padding=[1, 0]),
    case("2d-no-bias", [2, 3, 5, 6], [4, 3, 3, 2], bias=False),
    case("2d-lists-of-one", [1, 2, 6, 5], [3, 2, 2, 3], stride=[2], padding=[1], dilation=[2]),
    case("2d-strided", [2, 3, 7, 6], [4, 3, 3, 2], stride=[2, 3], padding=1),
    case("2d-stride-over-window", [1, 2, 9, 10], [3, 2, 2, 1], stride=[4, 3]),
    case("2d-unreached-rows", [1, 2, 8, 8], [3, 2, 3, 3], stride=[4, 3]),
    case("2d-dilated", [1, 2, 8, 7], [3, 2, 3, 2], padding=[2, 1], dilation=[2, 3]),
    case("2d-padded-past-the-window", [2, 1, 2, 3], [2, 1, 2, 2], padding=[4, 3]),
    case("2d-whole-image", [2, 2, 4, 3], [3, 2, 4, 3]),
    case("2d-patches", [2, 3, 6, 6], [4, 3, 3, 3], stride=3),
    case("2d-pointwise", [2, 3, 3, 4], [4, 3, 1, 1]),
    case("2d-grouped", [2, 4, 5, 6], [6, 2, 3, 2], padding=1, groups=2),
    case("2d-grouped-strided", [2, 6, 6, 5], [3, 2, 3, 2], stride=2, padding=1, groups=3),
    case("2d-depthwise", [1, 4, 5, 5], [4, 1, 3, 3], padding=1, groups=4),
    case("2d-depth-multiplier", [1, 3, 5, 5], [6, 1, 3, 3], stride=2, padding=1, groups=3),
    case("2d-no-images", [0, 3, 5, 5], [4, 3, 3, 3], padding=1),
    case("3d", [1, 2, 4, 3, 4], [3, 2, 2, 3, 2], padding=[1, 1, 0]),
    case("3d-strided-dilated", [1, 2, 5, 4, 4], [2, 2, 2, 2, 1], stride=[2, 1, 3],
         padding=[1, 2, 0], dilation=[2, 3, 1]),
    case("3d-grouped", [1, 4, 3, 4, 3], [4, 2, 2, 2, 2], padding=1, groups=2),
    case("same", [2, 2, 5, 6], [3, 2, 3, 5], padding="same"),
    case("same-even", [2, 2, 5, 6], [3, 2, 2, 4], padding="same"),
    case("same-even-dilated", [1, 2, 6, 5], [3, 2, 4, 2], padding="same", dilation=[2, 3]),
    case("same-1d-grouped", [2, 4, 6], [2, 2, 4], padding="same", stride=[1], groups=2),
    case("same-3d", [1, 1, 3, 4, 3], [2, 1, 2, 3, 1], padding="same"),
    case("valid-strided", [2, 2, 6, 7], [3, 2, 2, 3], padding="valid", stride=2),
    transposed("1d", [2, 3, 5], [3, 4, 3]),
    transposed("1d-lists-of-one", [2, 3, 5], [3, 4, 3], stride=[2], padding=[1], dilation=[2],
               output_padding=[1]),
    transposed("2d", [2, 3, 4, 5], [3, 4, 3, 2]),
    transposed("2d-no-bias", [2, 3, 4, 5], [3, 4, 3, 2], bias=False, stride=2),
    transposed("2d-doubling", [2, 3, 4, 3], [3, 2, 3, 3], stride=2, padding=1, output_padding=1),
    transposed("2d-doubling-even", [2, 3, 4, 3], [3, 2, 4, 4], stride=2, padding=1),
    transposed("2d-strides", [1, 2, 4, 3], [2, 3, 2, 3], stride=[2, 3], padding=[0, 1],
               output_padding=[1, 2]),
    transposed("2d-stride-over-window", [1, 2, 3, 3], [2, 3, 1, 2], stride=[3, 4],
               output_padding=[0, 3]),
    transposed("2d-patches", [2, 4, 2, 2], [4, 3, 3, 3], stride=3),
    transposed("2d-pointwise-strided", [2, 3, 3, 3], [3, 2, 1, 1], stride=2, output_padding=1),
    transposed("2d-output-padding-past-the-stride", [1, 2, 3, 3], [2, 2, 2, 2], stride=[1, 2],
               dilation=[3, 4], output_padding=[2, 3]),
    transposed("2d-output-padding-past-stride-and-padding", [1, 2, 4, 3], [2, 2, 3, 2], stride=1,
               padding=[1, 2], dilation=4, output_padding=[3, 3]),
    transposed("2d-padding-past-the-window", [1, 2, 5, 4], [2, 3, 2, 3], stride=2,
               padding=[3, 2]),
    transposed("2d-dilated", [1, 2, 4, 3], [2, 3, 3, 2], padding=[1, 0], dilation=[2, 3]),
    transposed("2d-down-to-one", [1, 2, 3, 4], [2, 3, 2, 2], padding=[1, 2], stride=[1, 1]),
    transposed("2d-grouped", [2, 4, 3, 4], [4, 3, 3, 2], stride=2, padding=1, groups=2),
    transposed("2d-depthwise", [1, 4, 4, 3], [4, 1, 3, 3], stride=2, padding=1, output_padding=1,
               groups=4),
    transposed("2d-depth-multiplier", [1, 3, 3, 3], [3, 2, 3, 3], stride=2, groups=3),
    transposed("2d-size-1", [1, 1, 1, 1], [1, 1, 1, 1]),
    transposed("2d-no-images", [0, 3, 4, 4], [3, 4, 3, 3], stride=2),
    transposed("3d", [1, 2, 3, 2, 3], [2, 3, 2, 2, 1], stride=[2, 1, 2], padding=[1, 0, 0],
               output_padding=[1, 0, 1]),
    transposed("3d-grouped-dilated", [1, 4, 2, 3, 2], [4, 1, 2, 2, 2], stride=2, groups=2,
               dilation=[2, 1, 3], padding=[1, 0, 1]),
]  # fmt: skip


def draw_case(seed: int) -> Case:
    """A convolution that PyTorch takes, transposed for odd seeds."""
    draw = random.Random(seed)
    rank = draw.choice([1, 2, 2, 3])
    largest = {1: 9, 2: 6, 3: 4}[rank]
    groups, inputs, outputs = draw.choice([1, 1, 2, 3]), draw.randint(1, 3), draw.randint(1, 3)

    def numbers(low: int, high: int) -> list[int]:
        return [draw.randint(low, high) for _ in range(rank)]

    size, window = numbers(1, largest), numbers(1, 3)
    stride, dilation, padding = numbers(1, 3), numbers(1, 3), numbers(0, 3)
    extra = [draw.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
    for i in range(rank):
        span = dilation[i] * (window[i] - 1) + 1
        if seed % 2:
            largest_output = stride[i] * (size[i] - 1) + span + extra[i]
            padding[i] = min(padding[i], (largest_output - 1) // 2)
        else:
            padding[i] = max(padding[i], -((size[i] - span) // 2))
    a, channels = inputs * groups, outputs * groups
    return case(
        f"random-{seed}",
        [draw.randint(1, 2), a, *size],
        [a, outputs, *window] if seed % 2 else [channels, inputs, *window],
        bias=draw.choice([True, False]),
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=bool(seed % 2),
        output_padding=extra if seed % 2 else 0,
        groups=groups,
    )


def integers(seed: int, shape: Sequence[int]) -> np.ndarray:
    """Small integers, from a generator whose stream NumPy keeps."""
    return np.random.RandomState(seed).randint(-3, 4, tuple(shape))


def operands(case: Case) -> dict[str, np.ndarray | None]:
    """The arrays a, weight and bias."""
    weight = case["weight"]
    channels = weight[1] * case["groups"] if case["transposed"] else weight[0]
    return {
        "a": integers(1, case["a"]),
        "weight": integers(2, weight),
        "bias": integers(3, [channels]) if case["bias"] else None,
    }


def arguments(case: Case) -> dict[str, Any]:
    """What `convolution` takes beside the operands."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return {name: case[name] for name in names}


def compute(case: Case) -> dict[str, Any]:
    """The case with shape and elements of the output, and of the gradients of its product with dy.

    dy is `integers(4, shape)`.
    """
    import torch  # pyright: ignore[reportMissingImports]

    def tensor(array: np.ndarray | None):
        return None if array is None else torch.tensor(array, dtype=torch.float64)

    arrays = {name: tensor(array) for name, array in operands(case).items()}
    for array in arrays.values():
        if array is not None:
            array.requires_grad_()
    numbers = {
        name: [value] if isinstance(value, int) and name not in ("transposed", "groups") else value
        for name, value in arguments(case).items()
    }
    if isinstance(case["padding"], str):  # which only the functions for a rank take
        function = getattr(torch.nn.functional, f"conv{len(case['a']) - 2}d")
        del numbers["transposed"], numbers["output_padding"]
    else:
        function = torch.ops.aten.convolution
    y = function(*arrays.values(), *numbers.values())
    y.backward(torch.tensor(integers(4, y.shape), dtype=torch.float64))
    results = {"y": y} | {f"d{name}": a.grad for name, a in arrays.items() if a is not None}
    elements = {name: result.flatten().int().tolist() for name, result in results.items()}
    return {**case, "shape": list(y.shape), **elements}


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("START", "STOP"))
    seeds = parser.parse_args().seeds
    chosen = (
        [*CASES, *map(draw_case, RECORDED_SEEDS)]
        if seeds is None
        else map(draw_case, range(*seeds))
    )
    lines = ",\n".join(json.dumps(compute(case), separators=(",", ":")) for case in chosen)
    print(f'{{"torch": "{torch.__version__}", "cases": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
