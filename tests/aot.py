# SPDX-License-Identifier: Apache-2.0
"""Compiles programs for H200s that need not be there, and reads what XLA made of them."""

import re
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from jaxcudnn import _load

H200 = (Path(__file__).parent / "data" / "h200_target.txtpb").read_text(encoding="utf-8")

# Given to one compilation, not in XLA_FLAGS, which are read once in a process and for all of it.
NO_AUTOTUNING: dict[str, Any] = {"xla_gpu_autotune_level": 0}  # tuning needs the GPU

MOVES = {"transpose", "copy", "copy-start", "reshape"}  # a reshape that is free is a bitcast


def require_plugin() -> None:
    """Skip the test where JAX's CUDA plugin, which holds XLA's compiler for it, is missing."""
    if not any(plugin.name.startswith("xla_cuda") for plugin in entry_points(group="jax_plugins")):
        pytest.skip("JAX's CUDA plugin (jax-cuda13-plugin, jax-cuda13-pjrt) is not installed")


def mesh(count: int = 1) -> jax.sharding.Mesh:
    """`count` H200s along one axis, "d"."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x1x{count}"
    )
    return topologies.make_mesh(topology, (count,), ("d",))


def shaped(shape: tuple[int, ...], dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


def place(arguments: Any, devices: jax.sharding.Mesh, *axes: str | None) -> Any:
    """Put arguments on devices, split over `axes` or replicated."""
    sharding = jax.NamedSharding(devices, jax.P(*axes))
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )


def compile(f: Any, *arguments: Any, dump: Path | None = None) -> "Program":
    """Compile `f`, for one device unless the arguments have been placed."""
    if jax.tree.leaves(arguments)[0].sharding is None:
        arguments = place(arguments, mesh())
    options = dict(NO_AUTOTUNING)
    if dump is not None:
        options |= {"xla_dump_to": str(dump)}
    return Program(jax.jit(f).lower(*arguments).compile(compiler_options=options))


@dataclass(frozen=True)
class Instruction:
    """One line of optimised HLO."""

    computation: str
    name: str
    opcode: str
    operands: tuple[str, ...]
    line: str
    is_root: bool

    @property
    def calls(self) -> str | None:
        called = re.search(r"\bcalls=%?([\w.\-]+)", self.line)
        return called and called[1]

    @property
    def attributes(self) -> dict[str, Any]:
        """What a call of ours says to the extension."""
        return parse_attributes(self.line)

    @property
    def operand_layouts(self) -> list[tuple[int, ...]]:
        """The axes of each operand from slowest to fastest."""
        constraints = re.search(r"operand_layout_constraints=\{(.*?\})\}", self.line)
        assert constraints, self.line
        orders = re.findall(r"\]\{([\d,]*)\}", constraints[1])
        return [tuple(int(axis) for axis in reversed(order.split(","))) for order in orders]


class Program:
    """A compiled program."""

    def __init__(self, compiled: Any):
        self.text: str = compiled.as_text()
        self.temporary_bytes: int = compiled.memory_analysis().temp_size_in_bytes

    @cached_property
    def instructions(self) -> list[Instruction]:
        found, computation = [], ""
        for line in self.text.splitlines():
            if start := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                computation = "ENTRY" if start[1] else start[2]
            elif parts := re.match(
                r"\s+(ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\((.*?)\)", line
            ):
                operands = tuple(re.findall(r"%([\w.\-]+)", parts[4]))
                found.append(
                    Instruction(computation, parts[2], parts[3], operands, line, bool(parts[1]))
                )
        return found

    @property
    def entry(self) -> list[Instruction]:
        return [i for i in self.instructions if i.computation == "ENTRY"]

    @property
    def calls(self) -> list[Instruction]:
        """The custom calls of ours."""
        return [i for i in self.instructions if f'custom_call_target="{_load.TARGET}"' in i.line]

    @property
    def operations(self) -> list[str]:
        """What our custom calls compute, sorted."""
        return sorted(call.attributes["op"] for call in self.calls)

    @property
    def moves(self) -> list[Instruction]:
        """What the entry does to move data about, by itself or within a fusion."""
        moving = {i.computation for i in self.instructions if i.opcode in MOVES}
        return [i for i in self.entry if i.opcode in MOVES or i.calls in moving]

    def count(self, opcode: str) -> int:
        return sum(i.opcode in (opcode, f"{opcode}-start") for i in self.instructions)


def parse_attributes(line: str) -> dict[str, Any]:
    """The attributes of a custom call, as optimised HLO or StableHLO prints them."""
    dictionary = re.search(r"backend_config ?= ?\{(.*?)\}", line)
    assert dictionary, line
    attributes: dict[str, Any] = {}
    for name, text in re.findall(r"(\w+) = (\".*?\"|dense<.*?> : \S+|[^,]+)", dictionary[1]):
        if text.startswith('"'):
            attributes[name] = text.strip('"')
        elif text in ("true", "false"):
            attributes[name] = text == "true"
        elif tensor := re.match(r"dense<\[?(.*?)\]?> : tensor<(\d+)xi64>", text):
            numbers = [int(number) for number in tensor[1].split(",")]
            attributes[name] = numbers * int(tensor[2]) if len(numbers) == 1 else numbers
        else:
            attributes[name] = int(text.split(" : ")[0])
    return attributes
