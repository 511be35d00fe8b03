# SPDX-License-Identifier: Apache-2.0
"""docs/plans.md: its code runs as it stands there, its figures are right, and nothing is left out.

A block of Python that follows the line `<!-- needs a GPU -->` runs where there is one; a block of
text is what the command line prints of the block `train.py` without a GPU.
"""

import ast
import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import jaxcudnn
from jaxcudnn import __main__ as command_line
from jaxcudnn import (
    _activations,
    _command_store,
    _doctor_settings,
    _load,
    _lowering,
    _options,
    store,
)
from tuned import tuned

ROOT = Path(__file__).parents[1]
PLANS = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
PAGES = {
    path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))
}
FILE = "train.py"
OPTIONS = {field.name: field for field in dataclasses.fields(jaxcudnn.Options)}


class Block(NamedTuple):
    needs_gpu: bool
    language: str
    text: str

    def run(self, names: dict[str, Any]) -> None:
        exec(compile(self.text, FILE, "exec"), names)


BLOCKS = [
    Block(bool(mark), language, text)
    for mark, language, text in re.findall(
        r"^(<!-- needs a GPU -->\n)?```(\w+)\n(.*?)^```$", PLANS, re.MULTILINE | re.DOTALL
    )
]
PYTHON = [block for block in BLOCKS if block.language == "python"]
(TRAIN,) = (block for block in PYTHON if block.text.startswith(f"# {FILE}\n"))
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("|").split("|")]
    for line in PLANS.splitlines()
    if line.startswith("| `") and line.count("|") == 5
]


@pytest.fixture(name="folder", autouse=True)
def own_folder_and_store(monkeypatch, tmp_path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXCUDNN_STORE", str(tmp_path / "store"))
    return tmp_path


@pytest.fixture(name="no_gpu")
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(_load, "local_device", lambda: None)


@pytest.fixture(name="environment")
def variables_read_anew(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    for name in OPTIONS:
        monkeypatch.delenv(f"JAXCUDNN_{name.upper()}", raising=False)
    yield monkeypatch
    monkeypatch.undo()
    _options.from_environment.cache_clear()


@pytest.mark.usefixtures("measuring", "no_gpu")
def test_blocks_without_a_gpu(folder):
    store.put([tuned(1), tuned(2)])
    names: dict[str, Any] = {}
    for block in PYTHON:
        if not block.needs_gpu:
            block.run(names)
    assert names["chosen"] == jaxcudnn.Options(deterministic=True, workspace_limit=64 << 20)
    assert names["measured"].shape == names["same_bits"].shape == (8, 32, 32, 16)
    assert names["y"].shape == names["z"].shape == (8, 16, 32, 32)
    assert (names["count"], names["news"]) == (2, 0)
    assert len(store.entries()) == 2


@pytest.mark.usefixtures("no_gpu")
def test_blocks_of_epilogues(capsys):
    text = PAGES[ROOT / "docs" / "epilogues.md"]
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, FILE, "exec"), names)
    assert names["z"].shape == names["y"].shape == (8, 32, 32, 16)
    assert names["up"].shape == (8, 64, 64, 16)
    assert capsys.readouterr().out.endswith("fprop relu6 cuDNN has only a slow engine with relu6\n")


@pytest.mark.usefixtures("no_gpu")
def test_block_of_exported_programs():
    text = PAGES[ROOT / "docs" / "export.md"]
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, FILE, "exec"), names)
    assert names["exported"].mlir_module().count(_load.TARGET) == 1
    np.testing.assert_array_equal(names["y"][:, :, 1:-1, 1:-1], np.full((5, 16, 30, 30), 72))


@pytest.mark.parametrize("name", _activations.ACTIVATIONS)
def test_the_page_on_epilogues_names_every_activation(name):
    """And what is kept for its derivative."""
    text = PAGES[ROOT / "docs" / "epilogues.md"]
    (row,) = (line for line in text.splitlines() if line.startswith("|") and f'`"{name}"`' in line)
    kept = "the output" if _activations.ACTIVATIONS[name].of_output else "the sum"
    assert row.split("|")[3].strip() == kept


@pytest.mark.gpu
@pytest.mark.usefixtures("measuring")
def test_all_blocks():
    jaxcudnn.clear_cache()
    names: dict[str, Any] = {}
    for block in PYTHON:
        block.run(names)
    for name in ("same_bits", "y"):  # sums of ones
        np.testing.assert_array_equal(names[name], names["measured"])
    table = names["table"]
    assert table.chosen.microseconds == table[0].microseconds
    for name in ("tuned", "thoroughly"):
        rows = names[name]
        assert (len(rows), rows.measured, rows.left_to_lax) == (5, 5, 0), name
    assert names["count"] >= 10 and names["news"] == 0
    (row,) = jaxcudnn.explain(names["conv"])(names["x"], names["w"])
    assert row.route == "cuDNN"


@pytest.mark.usefixtures("measuring", "no_gpu")
def test_output_of_commands(folder, monkeypatch, capsys):
    (folder / FILE).write_text(TRAIN.text)
    monkeypatch.syspath_prepend(folder)
    (expected,) = (block.text for block in BLOCKS if block.language == "text")
    commands = [
        shlex.split(line)[3:]
        for block in BLOCKS
        for line in block.text.splitlines()
        if line.startswith("python -m jaxcudnn explain")
    ]
    printed = []
    for command in commands:
        assert command_line.main(command) == 0
        printed.append(capsys.readouterr().out)
    del sys.modules[Path(FILE).stem]
    assert printed[0] == expected
    assert "1 convolution, 1 by cuDNN" in printed[1]


def test_options_are_in_the_table():
    assert [row[0] for row in ROWS] == list(OPTIONS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row_of_an_option(environment, row):
    name, default, in_python, in_environment = row
    names = {"jaxcudnn": jaxcudnn}
    assert getattr(jaxcudnn.Options(), name) == eval(default, names)
    chosen = eval(f"jaxcudnn.Options({in_python})", names)
    assert getattr(chosen, name) != getattr(jaxcudnn.Options(), name)
    variable, value = in_environment.split("=", 1)
    environment.setenv(variable, value)
    _options.from_environment.cache_clear()
    assert _options.current() == chosen


def test_options_have_a_sentence():
    prose = re.sub(r"^\|.*$", "", PLANS, flags=re.MULTILINE)
    for name in (*OPTIONS, *(field.name for field in dataclasses.fields(jaxcudnn.TuningBudget))):
        assert f"`{name}`" in prose, name


def test_figures():
    kept, reserved = f"{store.MAX_ENTRIES:,}", f"{_lowering.WORKSPACE_BUDGET >> 20} MiB"
    budget = jaxcudnn.TuningBudget()
    assert f"keeps the {kept} choices used last" in PLANS
    assert f"| no GPU, or a symbolic number of images | {reserved}, or" in PLANS
    assert f"takes {budget.milliseconds:.0f} ms at most" in PLANS


def test_public_names_are_mentioned():
    names = {
        alias.name: "jaxcudnn"
        for statement in ast.parse(Path(jaxcudnn.__file__).read_text(encoding="utf-8")).body
        if isinstance(statement, ast.ImportFrom) and statement.level
        for alias in statement.names
    }
    names |= {
        name: "jaxcudnn.store"
        for name, value in vars(store).items()
        if name[0] != "_" and getattr(value, "__module__", "").startswith("jaxcudnn")
    }
    assert {"conv", "store", "Choice", "import_"} < names.keys()
    for name, module in names.items():
        pattern = rf"`{name}`|\b{module}\.{name}\b"
        assert any(re.search(pattern, page) for page in PAGES.values()), name


def test_variables_are_mentioned():
    read = {
        variable
        for folder in ("jaxcudnn", "csrc", "tests", "benchmarks", "tools", "examples")
        for path in (ROOT / folder).glob("*.*")
        if path.suffix in (".py", ".cc", ".h")
        for variable in re.findall(
            r"environ\S*[(\[]\s*\"(JAXCUDNN_\w+)\"", path.read_text(encoding="utf-8")
        )
    }
    read |= {*_doctor_settings._OPTIONS.values(), _doctor_settings._STORE}
    assert read >= {*_doctor_settings._OF_TESTS}  # else the pattern finds none
    for variable in read:
        assert re.search(rf"\b{variable}\b", PLANS), variable


def test_commands_are_mentioned():
    for command in command_line._COMMANDS:
        name = command.__name__.rpartition("_")[2]
        assert re.search(rf"^python -m jaxcudnn {name}\b", PLANS, re.MULTILINE), name
    for action in _command_store._ACTIONS:
        assert re.search(rf"^python -m jaxcudnn store .*\b{action}\b", PLANS, re.MULTILINE), action


def test_links_lead_somewhere():
    for path, page in PAGES.items():
        anchors = {
            re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", page, re.MULTILINE)
        }
        for link in re.findall(r"\]\(([^)]+)\)", page):
            file, _, anchor = link.partition("#")
            if not file.startswith("http"):
                assert (path.parent / file).exists(), f"{path.name}: {link}"
                assert file or anchor in anchors, f"{path.name}: {link}"
