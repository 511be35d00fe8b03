# SPDX-License-Identifier: Apache-2.0
"""Print the table of docs/dtypes.md, from what lowering decides: `python tools/dtype_table.py`.

It needs jaxcudnn installed; `--write` puts the table into the file.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxcudnn._dtypes import accumulator, computed_in, is_complex, is_integer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "dtypes.md"
BEGIN, END = "<!-- begin: tools/dtype_table.py -->\n", "<!-- end: tools/dtype_table.py -->"
ROWS = [
    ("float16", "float16"), ("float16", "float32"), ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"), ("float32", "float32"), ("float32", "float64"),
    ("float64", "float64"), ("complex64", "complex64"), ("complex128", "complex128"),
    ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float16"),
    ("float8_e4m3fn", "bfloat16"), ("float8_e4m3fn", "float32"), ("float8_e5m2", "float8_e5m2"),
    ("float8_e5m2", "float16"), ("float8_e5m2", "bfloat16"), ("float8_e5m2", "float32"),
    ("int8", "int8"), ("int8", "int32"), ("int8", "float32"), ("int16", "float32"),
    ("int32", "int32"), ("uint8", "uint8"), ("bool", "bool"),
]  # fmt: skip
PARTS = {"complex64": "float32", "complex128": "float64"}


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Operands, result, what sums are kept in, what computes the result, and the gradients."""
    for operands, result in ROWS:
        if is_complex(operands):
            part = PARTS[operands]
            how = f"cuDNN, three times in {computed_in(part, part, part)}"
            yield operands, result, accumulator(part, part, part), how, how
        else:
            given = "int8" if operands == "bool" else operands
            counted = "int32" if result == "bool" else result
            sums = accumulator(given, given, counted)
            differentiable = not is_integer(given)
            gradients = by(computed_in(counted, given, given)) if differentiable else "none"
            yield operands, result, sums, by(computed_in(given, given, counted)), gradients


def by(dtype: str | None) -> str:
    """Say what computes in a dtype that cuDNN is given, or without it."""
    return f"cuDNN in {dtype}" if dtype else "matrix products"


def table() -> str:
    """Give the table in Markdown."""
    head = ("operands", "result", "sums", "result by, on CUDA", "gradients by, on CUDA")
    lines = [head, ("---",) * len(head), *rows()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text: str) -> str:
    """Give the page with the table as it should be."""
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + table() + text[stop:]


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/dtypes.md")
    if parser.parse_args(argv).write:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
