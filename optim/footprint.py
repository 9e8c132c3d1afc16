"""What a method holds in memory: the facts that peaks are predicted from before a run.

``dims`` is the shape of a parameter, ``hidden`` whether it is a matrix of attention or MLP (see
:mod:`forge.optim.groups`), ``itemsize`` the bytes of one of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

StateBytes = Callable[[tuple[int, ...], bool, int], float]

# Life of a gradient: kept until the step; freed as soon as its parameter is updated in backward;
# of linears not formed at all.
STORED, RELEASED, FUSED = "stored", "released", "fused"


@dataclass(frozen=True)
class Footprint:
    """Memory of a method beside the weights.

    Attributes:
        state: ``state(dims, hidden, itemsize)``: bytes of optimizer state of one parameter.
        gradients: ``stored``, ``released`` or ``fused``.
        step_bytes: temporaries while one parameter is updated, bytes an element.
        step_bytes_all: temporaries while all parameters are updated at once, bytes an element.
        queued_bytes: gradients, or their factors, that wait for a common launch.
    """

    state: StateBytes
    gradients: str = STORED
    step_bytes: float = 0.0
    step_bytes_all: float = 0.0
    queued_bytes: float = 0.0


def same_dtype(tensors: float) -> StateBytes:
    """``tensors`` states in the parameter's dtype."""
    return lambda dims, hidden, itemsize: tensors * itemsize * math.prod(dims)


def per_element(size: float) -> StateBytes:
    """``size`` bytes an element, whatever the parameter's dtype."""
    return lambda dims, hidden, itemsize: size * math.prod(dims)


def blockwise_8bit(small: Callable[[int], float]) -> StateBytes:
    """m and v as 8-bit codes with an fp32 scale each per 256 elements.

    Args:
        small: bytes an element of tensors under 4096 elements, given the parameter's itemsize.
    """

    def state(dims: tuple[int, ...], hidden: bool, itemsize: int) -> float:
        numel = math.prod(dims)
        return numel * (small(itemsize) if numel < 4096 else 2 + 2 * 4 / 256)

    return state


def low_rank(rank: int) -> StateBytes:
    """m and v of hidden matrices in ``rank`` directions, and the projection; of others in full."""

    def state(dims: tuple[int, ...], hidden: bool, itemsize: int) -> float:
        if not hidden:
            return 2 * itemsize * math.prod(dims)
        return itemsize * (2 * rank * max(dims) + rank * min(dims))

    return state


def factored(dims: tuple[int, ...], hidden: bool, itemsize: int) -> float:
    """fp32 row and column means of the squared gradient; of vectors every element."""
    return 4 * sum(dims)
