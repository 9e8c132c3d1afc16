"""What the benchmark must know about an optimizer: one frozen :class:`OptimizerSpec` each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from forge.optim.footprint import Footprint


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters every method is built with, passed explicitly: libraries' defaults differ.

    ``capturable`` asks for an optimizer whose whole step can be captured in a CUDA graph: step
    count on the device, learning rate as a 0-d device tensor.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    capturable: bool = False

    @property
    def adamw(self) -> dict[str, Any]:
        """The four keyword arguments that every AdamW-like constructor shares."""
        return dict(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


def backward_then_step(optimizer: Any, loss: Tensor, hyper: Hyper) -> None:
    """The usual end of a training step: ``backward``, ``step``, ``zero_grad``."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def backward_only(optimizer: Any, loss: Tensor, hyper: Hyper) -> None:
    """The end of a step whose update happens in hooks that run, and free gradients, in backward."""
    loss.backward()


@dataclass(frozen=True)
class OptimizerSpec:
    """One method of the comparison.

    Args:
        key: what the command line calls it (lower case, dashes), unique.
        method: its name in the leaderboard.
        target: ``"package.module:attribute"``, or ``"package.module"`` when ``build`` needs several
            names of it. Imported only when the row runs, so that a missing package is a row that
            says so.
        build: ``build(target, model, hyper)`` returns the optimizer of ``model``, which is
            already on its device and in its dtype.
        summary: one line: the algorithm and the exact configuration.
        distribution: PyPI name of the package (empty: comes with torch).
        licence: of that package.
        limits: what the method cannot do, one short phrase each.
        train: ends a step, given the loss; ``backward_then_step`` unless the method differs.
        devices: device types it runs on.
        states: how optimizer state is stored: ``bf16`` (the parameter's dtype), ``fp32``,
            ``int8`` ...
        exact: the method is AdamW up to rounding, so its loss must follow fp32 AdamW closely;
            otherwise the gate uses the looser tolerance.
        adamw_decay: its weight decay is AdamW's, so the gate checks it.
        capturable: honours ``Hyper.capturable``.
        footprint: what it holds in memory; ``None``: not known, so its peak is not predicted.
    """

    key: str
    method: str
    target: str
    build: Callable[[Any, nn.Module, Hyper], Any]
    summary: str
    distribution: str = ""
    licence: str = "BSD-3-Clause"
    limits: tuple[str, ...] = ()
    train: Callable[[Any, Tensor, Hyper], None] = backward_then_step
    devices: tuple[str, ...] = ("cpu", "cuda")
    states: str = "bf16"
    exact: bool = True
    adamw_decay: bool = True
    capturable: bool = False
    footprint: Footprint | None = None

    def resolve(self) -> Any:
        """Import ``target``. Raises ImportError or AttributeError when the package is missing."""
        name, _, attribute = self.target.partition(":")
        module = importlib.import_module(name)
        return getattr(module, attribute) if attribute else module
