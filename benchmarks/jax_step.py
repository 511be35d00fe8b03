# SPDX-License-Identifier: Apache-2.0
"""A training step of a network in JAX, and how long it takes: by XLA alone, or under `install`."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_models
import numpy as np
import optax
from device_time import Program
from machines import Machine
from model_table import Effort, Model
from record import Record
from step_times import step_figures, wall_ms

import jaxcudnn

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.05),
}

State = tuple[Any, Any, Any]
"""Parameters, running means of normalisations, and what the optimiser keeps."""


class Batch(NamedTuple):
    """What a step sees: inputs in bfloat16, and labels or float32 numbers."""

    inputs: Any
    targets: Any


class Training(NamedTuple):
    """A step, with the shapes of what it is given."""

    step: Callable[[State, Batch], tuple[State, jax.Array]]
    """Gives the new state, and the loss under the old one."""
    state: State
    batch: Batch
    classes: int

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.size for parameter in jax.tree.leaves(self.state[0]))


def training(name: str, model: Model, *, small: bool) -> Training:
    """Make a network, its optimiser and the step that trains it."""
    size = model.size(small=small)
    network = jax_models.NETWORKS[name](**model.arguments(small=small))
    optimizer = OPTIMIZERS[model.optimizer]()

    def loss_fn(parameters: Any, statistics: Any, batch: Batch) -> tuple[jax.Array, Any]:
        given = {"params": parameters, "batch_stats": statistics}
        outputs, changed = network.apply(given, batch.inputs, mutable=["batch_stats"])
        outputs = jnp.asarray(outputs, jnp.float32)
        if model.classes:
            losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch.targets)
        else:
            losses = abs(outputs - batch.targets)
        return losses.mean(), changed.get("batch_stats", {})

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        parameters, statistics, kept = state
        (loss, statistics), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
            parameters, statistics, batch
        )
        updates, kept = optimizer.update(gradient, kept, parameters)
        return (optax.apply_updates(parameters, updates), statistics, kept), loss

    inputs = jax.ShapeDtypeStruct((size.batch, *size.inputs), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct(
        (size.batch, *size.targets), jnp.int32 if model.classes else jnp.float32
    )
    variables = jax.eval_shape(network.init, jax.random.key(0), inputs)
    parameters = variables["params"]
    kept = jax.eval_shape(optimizer.init, parameters)
    state = parameters, variables.get("batch_stats", {}), kept
    return Training(step, state, Batch(inputs, targets), model.classes)


def draw(made: Training, seed: int = 0) -> tuple[State, Batch]:
    """Draw a state and a batch on the host, where nothing has to be compiled for it.

    Filters and matrices keep variances. Scales and variances are 1, all else is 0.
    """
    rng = np.random.default_rng(seed)

    def parameter(path: tuple[Any, ...], kind: Any) -> np.ndarray:
        if path[-1].key == "kernel":
            deviation = math.sqrt(2 / math.prod(kind.shape[:-1]))
            return np.float32(deviation) * rng.standard_normal(kind.shape, np.float32)
        return np.full(kind.shape, float(path[-1].key in ("scale", "var")), kind.dtype)

    parameters, statistics, kept = made.state
    zeros = jax.tree.map(lambda kind: np.zeros(kind.shape, kind.dtype), kept)
    parameters, statistics = jax.tree.map_with_path(parameter, (parameters, statistics))
    inputs, targets = made.batch
    images = rng.standard_normal(inputs.shape, np.float32).astype(inputs.dtype)
    if made.classes:
        numbers = rng.integers(made.classes, size=targets.shape)
    else:
        numbers = rng.uniform(-0.5, 0.5, targets.shape)
    batch = Batch(images, numbers.astype(targets.dtype))
    return jax.device_put(((parameters, statistics, zeros), batch))


def measure(made: Training, machine: Machine, record: Record, effort: Effort) -> None:
    """Time the first call of a jitted step in this process, and later ones."""
    record.figures(parameters=made.parameters)
    state, batch = jax.block_until_ready(draw(made))
    start = time.perf_counter()
    lowered = jax.jit(made.step, donate_argnums=0).lower(state, batch)
    is_lowered = time.perf_counter()
    compiled = lowered.compile()
    is_compiled = time.perf_counter()
    state, loss = jax.block_until_ready(compiled(state, batch))
    done = time.perf_counter()
    record.figures(
        first_s=done - start,
        lower_s=is_lowered - start,
        compile_s=is_compiled - is_lowered,
        run_s=done - is_compiled,
        first_loss=float(loss),
    )
    print(f"  first call {done - start:.1f} s", flush=True)

    def step() -> jax.Array:
        nonlocal state
        state, loss = compiled(state, batch)
        return loss

    for _ in range(effort.warm):
        jax.block_until_ready(step())
    program = Program(step)
    walls = [wall_ms(program.step, program.wait, effort.steps) for _ in range(effort.repeats)]
    record.figures(wall_ms=min(walls), walls_ms=walls)
    print(f"  {min(walls):.2f} ms a step", flush=True)
    _, *turns = [machine.turn(program, effort.traced_steps) for _ in range(1 + effort.turns)]
    record.figures(**step_figures(turns, effort.traced_steps), last_loss=float(step()))
    print(f"  {record.values['device_ms']:.2f} ms of them on the device", flush=True)
    statistics = jax.local_devices()[0].memory_stats() or {}
    record.figures(peak_mib=statistics.get("peak_bytes_in_use", 0) / 2**20)


def explain(made: Training, record: Record) -> None:
    """Record what jaxcudnn says of each convolution of the step, and how many are whose."""
    found = jaxcudnn.explain(made.step)(made.state, made.batch)
    for row in found:
        spec = row.spec
        geometry = spec and (spec.x_shape, spec.w_shape, spec.strides, spec.dilation, spec.groups)
        record.row(
            op=row.op,
            reading=row.reading,
            count=row.count,
            shapes=row.shapes,
            forward=geometry,
            dtypes=row.dtypes,
            route=row.route,
            reason=row.reason,
            plan=row.plan,
            workspace=row.workspace,
            tried=row.tried,
            us=row.microseconds,
            floor_us=row.floor_microseconds,
        )
    record.figures(
        convolutions=sum(row.count for row in found),
        left_to_lax=sum(row.count for row in found if row.reason),
        convolutions_ms=sum(row.count * (row.microseconds or 0) for row in found) / 1e3,
    )
