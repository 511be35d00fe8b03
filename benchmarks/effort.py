# SPDX-License-Identifier: Apache-2.0
"""How often the sections of conv_figures.py repeat what they measure."""

from typing import NamedTuple

from convolutions import RESNET50


class Effort(NamedTuple):
    """How often to repeat."""

    layers: int = len(RESNET50)
    rounds: int = 3
    steps: int = 12
    host_steps: int = 250
    chain_layers: int = 20
    chain_steps: int = 300
    chain_repeats: int = 7


QUICK = Effort(layers=2, rounds=2, steps=5, host_steps=20, chain_steps=20, chain_repeats=3)
