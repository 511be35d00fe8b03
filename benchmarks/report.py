# SPDX-License-Identifier: Apache-2.0
"""Turn the file of results into Markdown, so that no figure is ever typed.

    python benchmarks/report.py reports/benchmarks.json --write docs/benchmarks.md

prints the tables, and with `--write` puts them between the two marks in that file.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import model_report
import tuning_report
from tables import Figure, number, table

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def compared(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the rows in which cuDNN's frontend ran too."""
    return [row for row in section["rows"] if "frontend" in row["us"]]


FIGURES = (
    Figure(
        "Device time over cuDNN's Python frontend, same plan: the largest ratio",
        "layers",
        1.03,
        "",
        lambda section: max(row["ratio"] for row in compared(section)),
    ),
    Figure(
        "Kernels beside cuDNN's own in a step: the largest number",
        "layers",
        0,
        "",
        lambda section: max(map(len, (row["kernels_beside"] for row in compared(section)))),
    ),
    Figure(
        "Our share of Execute, median",
        "host",
        1,
        "us",
        lambda section: section["figures"]["share_ns"] / 1e3,
    ),
    Figure(
        "The same with bias, residual and ReLU",
        "host",
        1,
        "us",
        lambda section: section["figures"]["fused_share_ns"] / 1e3,
    ),
    Figure(
        "Initialize after the first time, median",
        "host",
        1,
        "us",
        lambda section: section["figures"]["initialize_ns"] / 1e3,
    ),
    Figure(
        "Chain of 20 small convolutions with ReLU, wall time over `lax`",
        "chain",
        0.5,
        "",
        lambda section: next(row["ratio"] for row in section["rows"] if row["kind"] == "streamed"),
    ),
    Figure(
        "Building and choosing a plan after the first, median",
        "plans",
        50,
        "ms",
        lambda section: section["figures"]["median_ms"],
    ),
    Figure(
        "Convolution with bias and ReLU, device time over the convolution alone: the largest ratio",
        "fused",
        1.03,
        "",
        lambda section: max(row["ratio"] for row in section["rows"]),
    ),
    Figure(
        "The same, and with a residual, over XLA's: the largest ratio",
        "fused",
        1,
        "",
        lambda section: max(ratio for row in section["rows"] for ratio in row["lax_ratios"]),
    ),
    Figure(
        "Reported problems, device time over `lax`: the largest ratio",
        "reported",
        1.03,
        "",
        lambda section: max(row["ratio"] for row in section["rows"] if "ratio" in row),
    ),
    Figure(
        "The same, transposed and strided gradients that `lax` reads otherwise",
        "reported",
        0.1,
        "",
        lambda section: max(row["ratio"] for row in section["rows"] if is_misread(row)),
    ),
    Figure(
        "Transposed convolutions, device time over PyTorch's: the largest ratio",
        "transposed",
        1.05,
        "",
        lambda section: max(row["torch_ratio"] for row in section["rows"] if "torch_ratio" in row),
    ),
    *tuning_report.FIGURES,
    *model_report.FIGURES,
)


def is_misread(row: dict[str, Any]) -> bool:
    """Whether XLA misses the operation, where that is known to cost the most."""
    strided_gradient = row["strided"] and row["pass"] != "fwd"
    return "ratio" in row and row["missed"] and (row["transposed"] or strided_gradient)


def render(results: dict[str, Any]) -> str:
    """Give all tables for which there are results."""
    sections = model_report.with_models(results["sections"])
    parts = [environment_line(results["environment"]), figures_table(sections)]
    for name, part in PARTS.items():
        if name in sections and (sections[name]["rows"] or sections[name]["figures"]):
            parts.append(part(sections[name]))
    failures = [text for section in sections.values() for text in section["failures"]]
    if failures:
        lines = [f"* {text.splitlines()[0][:300]}" for text in failures]
        parts.append("Not measured:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def environment_line(environment: dict[str, str | None]) -> str:
    """Name hardware and software."""
    names = {"cudnn": "cuDNN", "cudnn_frontend": "cuDNN's frontend", "python": "Python"}
    known = {key: value for key, value in environment.items() if value and key != "gpu"}
    software = ", ".join(f"{names.get(key, key)} {value}" for key, value in known.items())
    return f"Measured on: {environment.get('gpu')}, {software}."


def figures_table(sections: dict[str, Any]) -> str:
    """Compare each figure with its limit."""
    rows = []
    for figure in FIGURES:
        try:
            value = figure.value(sections[figure.section])
        except (KeyError, ValueError, StopIteration):
            continue  # not measured, or not yet
        verdict = "reached" if value <= figure.limit else "**missed**"
        limit, measured = (f"{number(x)} {figure.unit}".strip() for x in (figure.limit, value))
        rows.append((figure.text, limit, measured, verdict))
    return table(("figure", "at most", "measured", ""), rows)


def layers_part(section: dict[str, Any]) -> str:
    """Tell the device time of every layer and pass."""
    peers = compared(section)
    equal = sum(row["bit_equal"] for row in peers)
    text = (
        "ResNet-50 layers, batch 128, microseconds on the device. The frontend's result has the "
        f"same bits in {equal} of {len(peers)}."
    )
    beside = [
        f"* {row['layer']} {row['op']} {row['dtype']}: {', '.join(row['kernels_beside'])}"
        for row in peers
        if row["kernels_beside"]
    ]
    parts = [text, device_table(section["rows"])]
    if beside:
        parts.append("Kernels beside cuDNN's own:\n\n" + "\n".join(beside))
    return "\n\n".join(parts)


def device_table(rows: Iterable[dict[str, Any]]) -> str:
    """Tell device times, a row of the table for each row of results."""
    cells = []
    for row in rows:
        us = row["us"]
        own, peer, stock = us["jaxcudnn"], us.get("frontend"), us.get("lax")
        cells.append(
            (
                row["layer"],
                row["op"],
                row["dtype"],
                row["plan"].split("_")[0],
                f"{own:.1f}",
                f"{peer:.1f}" if peer else "",
                f"{row['ratio']:.3f}" if row["ratio"] else "",
                f"{stock:.1f}" if stock else "",
                f"{stock / own:.2f}" if stock else "",
            )
        )
    head = ("convolution", "pass", "dtype", "engine", "jaxcudnn", "frontend", "ratio")
    return table((*head, "`lax`", "`lax` / jaxcudnn"), cells)


def chain_part(section: dict[str, Any]) -> str:
    """Tell the wall time of the chain."""
    cells = [
        (
            row["kind"],
            f"{row['us']['jaxcudnn']:.0f}",
            f"{row['us']['lax']:.0f}",
            number(row["ratio"]),
        )
        for row in section["rows"]
    ]
    text = (
        "Chain of 20 convolutions 8x14x14x64, 3x3, bfloat16, with ReLU: wall microseconds a step."
    )
    return f"{text}\n\n{table(('steps', 'jaxcudnn', '`lax`', 'ratio'), cells)}"


def host_part(section: dict[str, Any]) -> str:
    """Tell the time in the handlers."""
    figures = section["figures"]
    rows = [
        (what, stage, number(figures[f"{key}{stage}_ns"]), number(figures[f"{key}{stage}_p90_ns"]))
        for what, key in (("convolution", ""), ("with bias, residual and ReLU", "fused_"))
        for stage in ("execute", "enqueue", "initialize")
        if f"{key}calls" in figures
    ]
    text = (
        f"Host nanoseconds in the handlers, {figures['calls']} calls of Execute; "
        "enqueue is cuDNN's part of it."
    )
    return f"{text}\n\n{table(('call', 'stage', 'median', '90th percentile'), rows)}"


def fused_part(section: dict[str, Any]) -> str:
    """Tell the device time of layers with bias, residual and ReLU."""
    labels = ("conv", "bias", "lax bias", "residual", "lax residual")
    cells = []
    for row in section["rows"]:
        us = row["us"]
        plans = [call["unfused"] or call["plan"].split("_")[0] for call in row["calls"].values()]
        times = [f"{us[label]:.1f}" if label in us else "" for label in labels]
        cells.append((row["layer"], ", ".join(plans), *times, f"{row['ratio']:.3f}"))
    head = ("convolution", "engines", "alone", "bias, ReLU", "by `lax`")
    head += ("bias, residual, ReLU", "by `lax`", "bias, ReLU over alone")
    text = (
        "ResNet-50 layers with bias and ReLU, and with a residual as well, batch 128, bfloat16: "
        "microseconds on the device."
    )
    return f"{text}\n\n{table(head, cells)}"


def plans_part(section: dict[str, Any]) -> str:
    """Tell the time to build plans."""
    figures = section["figures"]
    return (
        f"Plans of {figures['plans']} new convolutions: median {number(figures['median_ms'])} ms, "
        f"slowest {number(figures['max_ms'])} ms; the first of the process, which loads cuDNN's "
        f"libraries, {number(figures['first_ms'])} ms."
    )


def headline_part(section: dict[str, Any]) -> str:
    """Tell the device time of the gradients that XLA computes in a roundabout way."""
    text = "Gradients that XLA computes in a roundabout way, microseconds on the device."
    return f"{text}\n\n{device_table(section['rows'])}"


def reported_part(section: dict[str, Any]) -> str:
    """Tell what became of the reported problems, a row of the table for each pass."""
    head = ("report", "convolution", "pass", "route", "reading", "plan", "workspace")
    head += ("jaxcudnn", "`lax`", "ratio", "error", "remarks")
    text = (
        "Reported problems: microseconds on the device, workspace in MiB, the error against "
        "float64 relative to the largest of the drawn elements."
    )
    return f"{text}\n\n{table(head, map(reported_cells, section['rows']))}"


def reported_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Tell a row; what could not be measured stays empty, and the remarks say why."""
    us = row["us"]
    remarks = [row[key] for key in ("failure", "note") if key in row]
    if row.get("missed"):
        remarks.append(f"`lax` runs {row['lax_call']}")
    return (
        row["entry"],
        row["what"],
        row["pass"],
        row.get("route", ""),
        row.get("reading", ""),
        row.get("plan", ""),
        number(row["workspace"] / 2**20) if "workspace" in row else "",
        *(f"{us[label]:.1f}" if label in us else "" for label in ("jaxcudnn", "lax")),
        f"{row['ratio']:.3f}" if "ratio" in row else "",
        f"{row['error']:.1e}" if "error" in row else "",
        "; ".join(remarks).replace("|", "/").replace("\n", " ")[:200],
    )


def transposed_part(section: dict[str, Any]) -> str:
    """Tell the device time of transposed convolutions beside PyTorch's."""
    peer = section["figures"].get("torch", {"version": None, "faults": []})
    cells = [
        (
            row["entry"],
            row["pass"],
            row.get("plan", "").split("_")[0],
            *(
                f"{row['us'][label]:.1f}" if label in row["us"] else ""
                for label in ("jaxcudnn", "torch", "lax")
            ),
            f"{row['torch_ratio']:.3f}" if "torch_ratio" in row else "",
            f"{row['ratio']:.3f}" if "ratio" in row else "",
            f"{row['error']:.1e}" if "error" in row else "",
            row.get("failure", row.get("note", "")).replace("|", "/")[:200],
        )
        for row in section["rows"]
    ]
    head = ("layer", "pass", "engine", "jaxcudnn", "PyTorch", "`lax`")
    head += ("over PyTorch", "over `lax`", "error", "remarks")
    version = f"PyTorch {peer['version']}" if peer["version"] else "no PyTorch"
    text = f"Transposed convolutions, microseconds on the device, beside {version}."
    faults = "".join(f"\n* {fault.splitlines()[0][:300]}" for fault in peer["faults"])
    return "\n\n".join(filter(None, (text, table(head, cells), faults.strip())))


PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "layers": layers_part,
    "headline": headline_part,
    "chain": chain_part,
    "host": host_part,
    "plans": plans_part,
    "fused": fused_part,
    "reported": reported_part,
    "transposed": transposed_part,
    **tuning_report.PARTS,
    "models": model_report.models_part,
}


def insert(document: str, text: str) -> str:
    """Put `text` between the marks of a document.

    Raises:
        ValueError: the document does not have both marks, once and in order.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"expected {BEGIN} and then {END}, once each")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--write", type=Path, metavar="DOCUMENT", help="put the tables in this file"
    )
    args = parser.parse_args(argv)
    text = render(json.loads(args.results.read_text()))
    if args.write:
        args.write.write_text(insert(args.write.read_text(), text))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
