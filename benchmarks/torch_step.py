# SPDX-License-Identifier: Apache-2.0
"""A training step of a network in PyTorch, and how long it takes.

Arrays are channels-last, cuDNN's benchmark mode is on, TF32 is allowed, parameters are float32 and
`torch.autocast` computes in bfloat16. It must not share a process with JAX: each brings a profiler
and a cuDNN.
"""

import time
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch_models
from model_table import Effort, Model, Size
from record import Record
from step_times import Event, step_figures, wall_ms
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]
from torch_peer import visits

OPTIMIZERS = {
    "sgd": lambda parameters, **how: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **how),
    "adam": lambda parameters, **how: torch.optim.Adam(parameters, lr=1e-3, **how),
    "adamw": lambda parameters, **how: torch.optim.AdamW(
        parameters, lr=1e-3, weight_decay=0.05, **how
    ),
}

FORMS: dict[str, tuple[dict[str, Any], ...]] = {"hifi_gan": ({"lifted": False}, {"lifted": True})}
"""Arguments of the networks that have several forms, of which the fastest counts."""


def network(name: str, model: Model, *, small: bool, **form: Any) -> Any:
    """Make a network, and make sure that it is the one that JAX runs.

    Raises:
        RuntimeError: it has another number of parameters.
    """
    made = torch_models.NETWORKS[name](**model.arguments(small=small), **form)
    count = sum(p.numel() for p in made.parameters())
    if not small and count != model.parameters:
        raise RuntimeError(f"PyTorch's {name} has {count} parameters, not {model.parameters}")
    return made


def measure(
    name: str, model: Model, record: Record, effort: Effort, *, small: bool, compiled: bool
) -> None:
    """Time the first step in this process, and later ones; of several forms keep the fastest."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    record.figures(torch=torch.__version__, cudnn=torch.backends.cudnn.version())
    for form in FORMS.get(name, ({},)):
        made = network(name, model, small=small, **form)
        step = training_step(made, model, model.size(small=small), compiled=compiled)
        parameters = sum(p.numel() for p in made.parameters())
        found = {"form": form, "parameters": parameters, **first_figures(step)}
        print(f"  {form or ''}  first call {found['first_s']:.1f} s", flush=True)
        found |= later_figures(step, effort)
        print(f"  {found['wall_ms']:.2f} ms a step, {found['device_ms']:.2f} on the device")
        if found["wall_ms"] < record.values.get("wall_ms", float("inf")):
            record.figures(**found)


def training_step(made: Any, model: Model, size: Size, *, compiled: bool) -> Callable[[], Any]:
    """Give the function of no arguments that takes a step, and gives the loss before it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = {"device": device, "dtype": torch.bfloat16}
    inputs = torch.randn((size.batch, size.inputs[-1], *size.inputs[:-1]), **draw)
    memory = {4: torch.channels_last, 5: torch.channels_last_3d}.get(inputs.ndim)
    if memory:
        inputs = inputs.to(memory_format=memory)
    of_parameters = torch.channels_last if getattr(made, "lifted", False) else memory
    made = made.to(device, memory_format=of_parameters) if of_parameters else made.to(device)
    targets_shape = (size.batch, *size.targets)
    if model.classes:
        targets = torch.randint(model.classes, targets_shape, device=device)
    else:
        targets = torch.rand(targets_shape, device=device) - 0.5
    optimizer = OPTIMIZERS[model.optimizer](made.parameters(), fused=True)
    forward = torch.compile(made) if compiled else made

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            outputs = forward(inputs).float()
        loss = F.cross_entropy(outputs, targets) if model.classes else F.l1_loss(outputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def first_figures(step: Callable[[], Any]) -> dict[str, Any]:
    """Time the first step, with what cuDNN's benchmark mode and the compiler do in it."""
    start = time.perf_counter()
    loss = step().item()
    return {"first_s": time.perf_counter() - start, "first_loss": loss}


def later_figures(step: Callable[[], Any], effort: Effort) -> dict[str, Any]:
    """Time other steps, by the clock on the wall and by the profiler."""
    for _ in range(effort.warm):
        step().item()
    walls = [wall_ms(step, lambda loss: loss.item(), effort.steps) for _ in range(effort.repeats)]
    _, *turns = [turn(step, effort.traced_steps) for _ in range(1 + effort.turns)]
    on_gpu = torch.cuda.is_available()
    return {
        "wall_ms": min(walls),
        "walls_ms": walls,
        **step_figures(turns, effort.traced_steps),
        "last_loss": step().item(),
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0,
    }


def turn(step: Callable[[], Any], steps: int) -> list[Event]:
    """Give what runs on the GPU in some steps; without a GPU, one visit of all their time."""
    if not torch.cuda.is_available():
        start = time.perf_counter_ns()
        for _ in range(steps):
            step()
        return [Event("dry-run", start, time.perf_counter_ns() - start)]
    return [Event(*visit) for visit in visits(torch, step, steps)]
