# SPDX-License-Identifier: Apache-2.0
"""jaxcudnn's peer: the same plan, built and executed through cuDNN's own Python frontend.

It runs in the same process, on JAX's arrays and through the cuDNN that JAX has loaded, so that
nothing but the caller differs. It needs the wheel nvidia-cudnn-frontend.
"""

import ctypes
import importlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from device_time import Program

UIDS = {"x": 1, "w": 2, "y": 3}
DATA_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}


class Frontend:
    """The package `cudnn`, with a handle on the first GPU and CUDA's default stream."""

    def __init__(self, cudnn_path: str) -> None:
        """Import the package so that it uses the library at `cudnn_path`."""
        # Its way to be told where cuDNN is; the process's own linker has read the variable already.
        os.environ["LD_LIBRARY_PATH"] = str(Path(cudnn_path).parent)
        self.cudnn: Any = importlib.import_module("cudnn")
        loaded = mapped_libraries("libcudnn.so")
        if len(loaded) != 1:
            raise RuntimeError(f"expected one cuDNN in the process, found {sorted(loaded)}")
        self.driver = ctypes.CDLL("libcuda.so.1")
        self._enter_primary_context()
        self.handle = self.cudnn.create_handle()

    def program(
        self,
        attributes: dict[str, Any],
        plan_name: str,
        operands: Sequence[jax.Array],
        result: jax.Array,
    ) -> Program:
        """Give a program that executes the plan of this name and writes into `result`.

        Args:
            attributes: the operation, as jaxcudnn describes it to its custom call.
            plan_name: engine and knobs.
            operands: two of x, w and y, in the operation's order.
            result: the third, which JAX must not know to be constant.

        Raises:
            LookupError: cuDNN's heuristics offer no plan of this name.
        """
        graph, roles = build_graph(self.cudnn, attributes, handle=self.handle)
        index = plan_index(self.cudnn, graph, plan_name)
        graph.build_plan_at_index(index)
        size = graph.get_workspace_size_plan_at_index(index)
        workspace = jnp.zeros(max(1, size), jnp.uint8)
        # A jitted call's result is allocated before the last one is freed, so JAX writes to two
        # places in turn; one place alone would stay in the L2 cache.
        results = (result, jnp.copy(result))
        jax.block_until_ready((operands, results, workspace))
        tables = itertools.cycle(
            {
                UIDS[role]: array.unsafe_buffer_pointer()
                for role, array in zip(roles, (*operands, out), strict=True)
            }
            for out in results
        )
        scratch = workspace.unsafe_buffer_pointer()

        def step() -> jax.Array:
            assert workspace is not None  # the closure keeps it, and `results`, alive
            graph.execute_plan_at_index(next(tables), scratch, index, handle=self.handle)
            return results[0]

        return Program(step, lambda _: self.wait())

    def wait(self) -> None:
        """Wait for what was executed."""
        self._check(self.driver.cuStreamSynchronize(None), "cuStreamSynchronize")

    def _enter_primary_context(self) -> None:
        """Make the context that JAX and cuDNN work in this thread's current one."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self.driver.cuInit(0), "cuInit")
        self._check(self.driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
        retained = self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self._check(retained, "cuDevicePrimaryCtxRetain")
        self._check(self.driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    @staticmethod
    def _check(status: int, call: str) -> None:
        if status != 0:
            raise RuntimeError(f"{call} failed with CUresult {status}")


def build_graph(
    cudnn: Any, attributes: dict[str, Any], **target: Any
) -> tuple[Any, tuple[str, str, str]]:
    """Build the graph of an operation, with all its candidate plans.

    Args:
        cudnn: the package.
        attributes: the operation, as jaxcudnn describes it to its custom call.
        target: what `cudnn.pygraph` is to know of the device: a handle, or device properties.

    Returns:
        The graph, and the roles of its two operands and its result.
    """
    dtype = getattr(cudnn.data_type, DATA_TYPES[attributes["dtype"]])
    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=dtype, intermediate_data_type=single, compute_data_type=single, **target
    )

    def operand(role: str) -> Any:
        sizes = attributes[role]
        return graph.tensor(
            dim=sizes, stride=channels_last_strides(sizes), data_type=dtype, uid=UIDS[role]
        )

    geometry = {key: attributes[key] for key in ("pre_padding", "post_padding", "stride")}
    geometry["dilation"] = attributes["dilation"]
    op = attributes["op"]
    if op == "fprop":
        first, second, third = "x", "w", "y"
        out = graph.conv_fprop(operand("x"), operand("w"), **geometry)
    elif op == "dgrad":
        first, second, third = "y", "w", "x"
        out = graph.conv_dgrad(operand("y"), operand("w"), **geometry)
    else:
        first, second, third = "x", "y", "w"
        out = graph.conv_wgrad(operand("x"), operand("y"), **geometry)
    sizes = attributes[third]
    out.set_output(True).set_uid(UIDS[third]).set_data_type(dtype)
    out.set_dim(sizes).set_stride(channels_last_strides(sizes))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph, (first, second, third)


def plan_index(cudnn: Any, graph: Any, name: str) -> int:
    """Find a plan by name among the heuristics' candidates.

    Raises:
        LookupError: it is not among them.
    """
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    if name not in names:
        raise LookupError(
            f"cuDNN frontend {cudnn.__version__} offers no plan {name}, but {', '.join(names[:5])} "
            f"and {max(0, len(names) - 5)} more"
        )
    return names.index(name)


def channels_last_strides(sizes: Sequence[int]) -> list[int]:
    """Give the strides of N C positions... sizes that lie in memory as N positions... C."""
    strides, stride = [0] * len(sizes), 1
    for axis in (1, *range(len(sizes) - 1, 1, -1), 0):
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def mapped_libraries(name: str) -> set[str]:
    """Give the files of this process whose path has `name` in it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {os.path.realpath(path) for line in lines if name in (path := line.split()[-1])}
