# SPDX-License-Identifier: Apache-2.0
"""Figures and tables of what `models.py` measures, a section for each network by each library."""

from typing import Any

from model_table import IMPLEMENTATIONS, MODELS
from tables import Figure, number, table

SECTIONS = {
    f"{model} by {implementation}": (model, implementation)
    for model in MODELS
    for implementation in IMPLEMENTATIONS
}
"""The names of the sections."""

NAMES = {
    "stock": "JAX",
    "installed": "JAX under `install`",
    "torch": "PyTorch",
    "torch.compile": "PyTorch's compiler",
}


def with_models(sections: dict[str, Any]) -> dict[str, Any]:
    """Add a section "models", which has the figures of all networks as rows."""
    rows = [
        {"model": model, "implementation": implementation, **sections[name]["figures"]}
        for name, (model, implementation) in SECTIONS.items()
        if name in sections and sections[name]["figures"]
    ]
    return sections | {"models": {"rows": rows, "figures": {}, "failures": []}}


def value(section: dict[str, Any], model: str, implementation: str, name: str) -> float:
    """Give a figure of a network; StopIteration or KeyError if it was not measured."""
    return next(
        row[name]
        for row in section["rows"]
        if (row["model"], row["implementation"]) == (model, implementation)
    )


def over_stock(model: str, text: str) -> Figure:
    """Ask that a network does not become slower."""
    return Figure(
        f"Training step of {text} under `install`, wall time over JAX's own",
        "models",
        1,
        "",
        lambda section: (
            value(section, model, "installed", "wall_ms")
            / value(section, model, "stock", "wall_ms")
        ),
    )


def within(model: str, text: str, milliseconds: float) -> Figure:
    """Ask that a step takes no more."""
    return Figure(
        f"Training step of {text} under `install`",
        "models",
        milliseconds,
        "ms",
        lambda section: value(section, model, "installed", "wall_ms"),
    )


FIGURES = (
    over_stock("resnet50", "ResNet-50"),
    over_stock("convnext_t", "ConvNeXt-T"),
    within("unet3d", "the 3-D U-Net", 20),
    within("hifi_gan", "the HiFi-GAN-like decoder", 22),
    Figure(
        "First call of a training step under `install`: the longest",
        "models",
        15,
        "s",
        lambda section: max(
            row["first_s"]
            for row in section["rows"]
            if row["implementation"] == "installed" and "first_s" in row
        ),
    ),
)


def models_part(section: dict[str, Any]) -> str:
    """Tell how long steps and first calls take, a row of the table for each network and library."""
    text = "Training steps of whole networks. A first call is a process's, with nothing stored."
    versions = {row["torch"] for row in section["rows"] if "torch" in row}
    if versions:
        text += f" PyTorch is {', '.join(sorted(versions))}."
    head = ("network", "by", "step, ms", "on the device, ms", "first call, s", "memory, GiB")
    head += ("convolutions", "theirs, ms")
    return f"{text}\n\n{table(head, map(cells, section['rows']))}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Tell a row; what was not measured stays empty."""

    def told(name: str, scale: float = 1) -> str:
        return number(row[name] / scale) if row.get(name) else ""

    convolutions = ""
    if "convolutions" in row:
        convolutions = str(row["convolutions"])
        if row["left_to_lax"]:
            convolutions += f", {row['left_to_lax']} left to `lax`"
    return (
        MODELS[row["model"]].title,
        NAMES[row["implementation"]],
        told("wall_ms"),
        told("device_ms"),
        told("first_s"),
        told("peak_mib", 1024),
        convolutions,
        told("convolutions_ms"),
    )
