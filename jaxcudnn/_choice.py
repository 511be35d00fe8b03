# SPDX-License-Identifier: Apache-2.0
"""A tuned choice: which plan was fastest for one convolution on one kind of GPU."""

import sys
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Choice:
    """The plan that measuring chose for a convolution.

    Texts are printable and not empty, numbers finite and not negative.

    Attributes:
        key: the convolution and the options that bear on the choice.
        gpu: the GPU's model.
        cudnn: cuDNN's version, such as '9.19.0'.
        plan: the plan's name, such as 'eng5_k2=0'.
        microseconds: what one execution took.
        workspace: bytes of scratch memory.
        tried: how many plans were timed.
        milliseconds: what measuring them cost.
        reserved: the bytes of scratch memory that programs reserve for the convolution, so that
            they are the same before and after it was measured; 0 if that is not known.

    Raises:
        TypeError: for a value of the wrong kind.
        ValueError: for one out of its range.
    """

    key: str
    gpu: str
    cudnn: str
    plan: str
    microseconds: float
    workspace: int
    tried: int
    milliseconds: float
    reserved: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for each in fields(self):
            _CHECKS[each.type](each.name, getattr(self, each.name))
            if each.type is float:
                object.__setattr__(self, each.name, float(getattr(self, each.name)))


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"jaxcudnn.store.Choice: {name} must be a string, got {value!r}")
    if not (value and value.isprintable()):
        raise ValueError(f"jaxcudnn.store.Choice: {name} must be printable text, got {value!r}")


def _check_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"jaxcudnn.store.Choice: {name} must be an integer, got {value!r}")
    if not 0 <= value < 2**63:
        raise ValueError(f"jaxcudnn.store.Choice: {name} must be from 0 to 2^63 - 1, got {value!r}")


def _check_float(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"jaxcudnn.store.Choice: {name} must be a number, got {value!r}")
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(
            f"jaxcudnn.store.Choice: {name} must be finite and at least 0, got {value!r}"
        )


_CHECKS: dict[Any, Any] = {str: _check_text, int: _check_int, float: _check_float}
