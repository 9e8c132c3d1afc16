"""How optimizer states are stored: the formats, and the state tensors of a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from forge.optim.rules import Rule

# `None`: the parameter's own dtype, as torch.optim does.
FORMATS: dict[str, torch.dtype | None] = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
ROUNDINGS = ("stochastic", "nearest")


def check_format(states: str, rounding: str) -> None:
    """Raise ValueError when ``states`` or ``rounding`` is not one of the known names."""
    if states not in FORMATS:
        raise ValueError(f"states={states!r}: choose one of {', '.join(FORMATS)}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r}: choose one of {', '.join(ROUNDINGS)}")


def state_dtype(states: str, param: Tensor) -> torch.dtype:
    """The dtype in which ``param``'s states are stored."""
    return FORMATS[states] or param.dtype


def new_states(rule: Rule, states: str, param: Tensor) -> dict[str, Tensor]:
    """Zero states of ``param`` by name: its shape and strides, in the storage dtype."""
    dtype = state_dtype(states, param)
    return {
        name: torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        for name in rule.states
    }
