# SPDX-License-Identifier: Apache-2.0
"""What the examples share: training steps with their times, and what computes the convolutions."""

import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

# A function of a program's text, and the call of one.
NAME = r'@("[^"]*"|[\w.$-]+)\('
FUNCTION = re.compile(rf"^  func\.func \w+ {NAME}(.*?)^  \}}$", re.MULTILINE | re.DOTALL)
CALL = re.compile(rf"\bcall {NAME}")


def implementation(lowered: jax.stages.Lowered) -> str:
    """Say how the convolutions of a program are implemented, by counting them in its text.

    JAX writes what comes more than once as a function: that counts wherever it is called.
    """
    functions = dict(FUNCTION.findall(lowered.as_text()))

    def count(pattern: str, name: str = "main") -> int:
        body = functions[name]
        called = sum(count(pattern, each) for each in CALL.findall(body))
        return called + len(re.findall(pattern, body))

    cudnn, xla = count(r"custom_call @jaxcudnn_conv_v\d+\("), count(r"stablehlo\.convolution\(")
    return f"{cudnn} through cuDNN (jaxcudnn_conv), {xla} through XLA (stablehlo.convolution)"


def judge(right: np.ndarray, least: float, remark: str = "") -> int:
    """Print the accuracy, of which so much is asked, and give the status to exit with."""
    print(f"Test accuracy {right.mean():.1%} ({right.sum()} of {right.size}){remark}")
    if right.mean() < least:
        print(f"Less than the {least:.1%} of --min-accuracy.", file=sys.stderr)
        return 1
    return 0


class Run(NamedTuple):
    """What a run of training steps leaves behind."""

    state: Any
    losses: np.ndarray
    """One for each step."""
    first_seconds: float
    """The first step, with tracing and compiling it, and choosing cuDNN's plans."""
    step_seconds: float
    """Each of the others: their median, or NaN without any."""

    def __str__(self) -> str:
        """Say how long it took and what came of it."""
        said = f"first step {self.first_seconds:.1f} s"
        if not math.isnan(self.step_seconds):
            said += f", then {1e3 * self.step_seconds:.1f} ms a step"
        return f"{said}; loss {self.losses[0]:.4f} before the first and {self.losses[-1]:.4f} " + (
            f"before step {len(self.losses)}"
        )


def run(
    step: Callable[[Any, Any], tuple[Any, jax.Array]],
    state: Any,
    batches: Iterable[Any],
    total: int,
) -> Run:
    """Take a training step for each batch, after saying where it runs and through what.

    Args:
        step: a function of state and batch that JAX can trace; its results are the new state and
            the loss of the batch under the old one.
        state: a tree of arrays. They are given up to the first step.
        batches: trees of arrays, all of the same shapes.
        total: how many there are, for the progress bar.
    """
    losses, seconds, compiled = [], [], None
    with tqdm(batches, total=total, unit="step") as progress:
        for batch in progress:
            start = time.perf_counter()
            if compiled is None:
                lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
                compiled = lowered.compile()  # so that what runs is what is described
                (device,) = jax.tree.leaves(state)[0].devices()
                with progress.external_write_mode():
                    print(f"Convolutions of a step, on {device.device_kind}:", end=" ")
                    print(implementation(lowered))
            state, loss = jax.block_until_ready(compiled(state, batch))
            seconds.append(time.perf_counter() - start)
            losses.append(float(loss))
            progress.set_postfix(loss=f"{losses[-1]:.4f}")
    later = float(np.median(seconds[1:])) if len(seconds) > 1 else math.nan
    return Run(state, np.array(losses), seconds[0], later)


def relu_bound(layers: int, terms: int) -> float:
    """Return how far apart, relatively, rounding can bring two float32 gradients of a ReLU network.

    Both are vectors of all parameters, and far apart is the norm of their difference. A sum of k
    products is off by about sqrt(k) eps (Higham and Mary, SIAM J. Sci. Comput. 41, 2019). Of the
    units, which are about as large as their sums' errors are small, a share e is so close to zero
    that an error of e turns its ReLU on or off. That changes a share e of the squared norm.

    Args:
        layers: how many convolutions lie on the way from the images to the loss.
        terms: how many terms the longest sum has.
    """
    error = 2 * 2 * layers * math.sqrt(terms) * float(np.finfo(np.float32).eps)
    return math.sqrt(error)


def distance(ours: Any, theirs: Any) -> float:
    """Return the norm of the difference of two trees of arrays over the norm of the second."""
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    apart = math.hypot(*(float(np.linalg.norm(np.asarray(a) - np.asarray(b))) for a, b in pairs))
    return apart / math.hypot(*(float(np.linalg.norm(np.asarray(b))) for _, b in pairs))
