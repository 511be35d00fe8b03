# SPDX-License-Identifier: Apache-2.0
"""Run every plan that cuDNN offers for random convolutions and compare it with the definition.

    python benchmarks/plan_survey.py 0 60 --output survey.jsonl

Operands are small integers and results are compared with ==, after NaN has been written to them. A
line is written for each wrong plan, and one for each convolution and pass that counts right and
wrong plans by engine. What comes out belongs in csrc/known_faults.cc and docs/decisions.md. Plans
that compile their kernels at run time are left out: each takes seconds to build.

It needs a GPU and the wheel nvidia-cudnn-frontend.
"""

import argparse
import collections
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from frontend import UIDS, Frontend, build_graph

from jaxcudnn import _load, _lowering

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import cases
import oracle
from test_gpu_fuzz import draw_case

PLANS_PER_ENGINE = 3
"""Plans of one engine differ in tile sizes, seldom in what they get wrong."""


def attributes(case: cases.Case, role: str, dtype: str) -> dict[str, Any]:
    """Give what the custom call is told of the pass that computes `role`."""
    shapes = (jax.ShapeDtypeStruct(case.shape(name), dtype) for name in cases.OPERANDS[role])
    (equation,) = jax.make_jaxpr(case.cudnn(role))(*shapes).eqns
    op = equation.primitive.name.removeprefix("conv_")
    return _lowering._attributes(op, equation.params["spec"])


def channels_last(array: Any, case: cases.Case, role: str) -> np.ndarray:
    """Reorder a user's array into the memory order that cuDNN is given."""
    return np.moveaxis(np.asarray(array, np.float32).transpose(case.axes(role)), 1, -1)


def precompiled_plans(cudnn: Any, graph: Any) -> Iterator[tuple[int, str]]:
    """Give index and name of plans from the heuristics and, by number, of every engine."""
    for engine in range(graph.get_engine_count()):
        try:
            graph.create_execution_plan(engine, {})
        except Exception:  # an engine that is not for this graph
            continue
    seen: collections.Counter[str] = collections.Counter()
    names = set()
    for index in range(graph.get_execution_plan_count()):
        name = graph.get_plan_name_at_index(index)
        engine = name.split("_")[0]
        notes = graph.get_behavior_notes_for_plan_at_index(index)
        compiles = cudnn.behavior_note.RUNTIME_COMPILATION in notes
        if name in names or compiles or seen[engine] == PLANS_PER_ENGINE:
            continue
        names.add(name)
        seen[engine] += 1
        yield index, name


def survey(frontend: Frontend, seed: int, role: str) -> Iterator[dict[str, Any]]:
    """Give one record for each wrong plan of a pass, and one with the counts."""
    case, dtype = draw_case(seed)
    arrays = {name: cases.integers(i, case.shape(name), dtype) for i, name in enumerate("xwy")}
    operands = [arrays[name] for name in cases.OPERANDS[role]]
    exact, _ = oracle.compute(role, *operands, case=case)
    expected = channels_last(exact.astype(dtype), case, role)
    described = attributes(case, role, dtype)
    graph, roles = build_graph(frontend.cudnn, described, handle=frontend.handle)
    inputs = [jnp.asarray(channels_last(arrays[name], case, name), dtype) for name in roles[:2]]
    counts: collections.Counter[str] = collections.Counter()
    for index, name in precompiled_plans(frontend.cudnn, graph):
        try:
            graph.build_plan_at_index(index)
        except Exception:  # offered, and refused after all
            continue
        computed = execute(frontend, graph, index, roles, inputs, expected.shape, dtype)
        right = np.array_equal(computed, expected)
        counts[f"{name.split('_')[0]} {'right' if right else 'wrong'}"] += 1
        if not right:
            yield {"seed": seed, "op": described["op"], "plan": name, "case": str(case)}
    yield {"seed": seed, "op": described["op"], "dtype": dtype, "counts": dict(counts)}


def execute(
    frontend: Frontend, graph: Any, index: int, roles: Any, inputs: Any, shape: Any, dtype: str
) -> np.ndarray:
    """Run one plan into memory that holds NaN."""
    size = graph.get_workspace_size_plan_at_index(index)
    workspace = jnp.zeros(max(1, size), jnp.uint8)
    result = jnp.full(shape, jnp.nan, dtype)
    jax.block_until_ready((inputs, workspace, result))
    pointers = {
        UIDS[role]: array.unsafe_buffer_pointer()
        for role, array in zip(roles, (*inputs, result), strict=True)
    }
    scratch = workspace.unsafe_buffer_pointer()
    graph.execute_plan_at_index(pointers, scratch, index, handle=frontend.handle)
    frontend.wait()
    return np.asarray(result, np.float32)


def main() -> None:
    """Survey the random convolutions of a range of seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("start", type=int)
    parser.add_argument("stop", type=int)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    jax.devices("cuda")
    frontend = Frontend(_load.cudnn().cudnn_path())
    with args.output.open("w") as file:
        for seed in range(args.start, args.stop):
            for role in cases.OPERANDS:
                for record in survey(frontend, seed, role):
                    print(json.dumps(record), file=file, flush=True)


if __name__ == "__main__":
    main()
