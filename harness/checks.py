"""The gate: a row is timed only after its method trained as fp32 AdamW does.

The method takes :data:`GATE_STEPS` real steps on a fresh model with random weights, on the same
batches as the reference. Four things are compared, each able to fail on its own: the loss
trajectory; how far the loss fell; how far the weights moved; and how much they shrank towards zero
(weight decay). The gate's rate and decay are far above a training recipe's so that all of them
stand clear of bf16 rounding: a method that updates nothing, updates twice, ignores its gradients or
weight decay fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge.optim.spec import Hyper

GATE_STEPS = {"cuda": 10, "cpu": 6}
# A step moves a weight by about 1e-3 (8 bf16 ulps at 0.02); decay takes 2^-7 of it, so that bf16
# holds the factor 1 - lr * weight_decay exactly.
GATE_HYPER = Hyper(lr=1e-3, weight_decay=7.8125)
STATE_OF_TRUTH = "torch AdamW, fp32 weights and states"


@dataclass(frozen=True)
class Tolerance:
    """How far a method may be from the reference.

    Attributes:
        loss: largest ``|loss - reference loss|`` at any step, as a share of how far the reference
            loss moved; None: not judged.
        learned: smallest fall of the loss from the first step to the last, as a share of the
            reference's. A loss that stays flat is within any gap that a lossy method needs.
        moved: largest factor between the distances that the weights moved.
        shrink: largest difference of the shrinkage towards zero, as a share of the reference's.
    """

    loss: float | None
    learned: float
    moved: float
    shrink: float


EXACT = Tolerance(loss=0.05, learned=0.9, moved=1.25, shrink=0.25)
# A lossy method takes steps of its own size (APOLLO at rank 256: 5 x AdamW's, so that its loss
# overshoots): only gross errors and a wrong decay can be told from the method. On an H200
# the losses of the lossy methods fell by 0.87 to 1.09 of the reference's; with noise for gradients
# they hardly fall (0.04 on a CPU).
LOSSY = Tolerance(loss=None, learned=0.5, moved=8.0, shrink=0.5)
# bf16 vectors (norm weights near 1, ulp 0.004 to 0.008) round a step of 0.01 coarsely.
VECTOR_SLACK = 2.0
# What bf16 activations alone change in the loss.
LOSS_FLOOR = 0.01


@dataclass(frozen=True)
class Movement:
    """How one kind of parameter changed. ``distance`` is the L2 norm of the change, ``shrink`` the
    share of the initial weights that it took away: ``-<change, w0> / <w0, w0>``."""

    distance: float
    shrink: float


@dataclass(frozen=True)
class Trajectory:
    """A short training run: the loss before each update, movement by kind, and what stayed put."""

    losses: list[float]
    movement: dict[str, Movement]
    unmoved: list[str]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Trajectory:
        """Inverse of :meth:`to_json`."""
        movement = {kind: Movement(**m) for kind, m in raw["movement"].items()}
        return Trajectory(raw["losses"], movement, raw["unmoved"])


def run_trajectory(
    model: nn.Module,
    step: Callable[[dict[str, Tensor]], Tensor],
    batches: Sequence[dict[str, Tensor]],
    steps: int,
) -> Trajectory:
    """Take ``steps`` training steps, cycling through ``batches``, and describe what they did.

    Args:
        step: ``step(batch)`` trains once and returns the loss before its update.
    """
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    losses = [float(step(batches[i % len(batches)])) for i in range(steps)]
    return Trajectory(losses, *_movement(model, before))


def _movement(model: nn.Module, before: dict[str, Tensor]) -> tuple[dict[str, Movement], list[str]]:
    sums: dict[str, list[float]] = {}
    unmoved = []
    for name, parameter in model.named_parameters():
        if name not in before:
            continue
        start = before.pop(name).float()
        change = parameter.detach().float() - start
        total = sums.setdefault(_kind(parameter), [0.0, 0.0, 0.0])
        values = ((change * change).sum(), (change * start).sum(), (start * start).sum())
        for i, value in enumerate(values):
            total[i] += float(value)
        if not bool(change.any()):
            unmoved.append(name)
    movement = {
        kind: Movement(math.sqrt(dd), -dw / ww if ww else 0.0)
        for kind, (dd, dw, ww) in sums.items()
    }
    return movement, unmoved


def _kind(parameter: Tensor) -> str:
    """Kinds stay the same when matrices are packed: vectors, embedding-like, other matrices."""
    if parameter.ndim < 2:
        return "vectors"
    rows, columns = parameter.shape[0], parameter[0].numel()
    return "embeddings" if rows >= 16 * columns else "matrices"


def judge(
    run: Trajectory, reference: Trajectory, exact: bool, adamw_decay: bool = True
) -> list[str]:
    """Reasons why ``run`` fails against ``reference``; an empty list passes.

    Args:
        exact: the method is AdamW up to rounding: the tight tolerances.
        adamw_decay: its weight decay is AdamW's; otherwise the shrinkage is not judged.
    """
    tolerance = EXACT if exact else LOSSY
    if not all(math.isfinite(loss) for loss in run.losses):
        return [f"loss is not finite: {_short(run.losses)}"]
    reasons = []
    if run.unmoved:
        shown = ", ".join(run.unmoved[:3])
        more = f" and {len(run.unmoved) - 3} more" if len(run.unmoved) > 3 else ""
        reasons.append(f"{len(run.unmoved)} parameters never moved: {shown}{more}")
    gap, allowed = loss_gap(run, reference), math.inf
    if tolerance.loss is not None:
        allowed = tolerance.loss * _loss_span(reference) + LOSS_FLOOR
    if gap > allowed:
        reasons.append(
            f"loss is {gap:.3f} from {STATE_OF_TRUTH} (allowed {allowed:.3f}): "
            f"{_short(run.losses)} against {_short(reference.losses)}"
        )
    fell, needed = _fall(run), tolerance.learned * _fall(reference) - LOSS_FLOOR
    if fell < needed:
        reasons.append(
            f"loss fell by {fell:.3f}, must by {needed:.3f}: {_short(run.losses)} against "
            f"{_short(reference.losses)}"
        )
    for kind, truth in reference.movement.items():
        reasons += _judge_movement(kind, run.movement.get(kind), truth, tolerance, adamw_decay)
    return reasons


def _judge_movement(
    kind: str, run: Movement | None, truth: Movement, tolerance: Tolerance, adamw_decay: bool
) -> list[str]:
    if run is None:
        return [f"no {kind} were trained"]
    slack = VECTOR_SLACK if kind == "vectors" else 1.0
    reasons = []
    ratio = run.distance / truth.distance if truth.distance else math.inf
    allowed = 1 + (tolerance.moved - 1) * slack
    if not 1 / allowed <= ratio <= allowed:
        reasons.append(f"{kind} moved {ratio:.2f} x the reference's distance (allowed {allowed:g})")
    share = abs(run.shrink - truth.shrink) / abs(truth.shrink) if truth.shrink else math.inf
    if adamw_decay and share > tolerance.shrink * slack:
        reasons.append(
            f"{kind} shrank by {run.shrink:.3f}, the reference by {truth.shrink:.3f}: "
            "weight decay is not AdamW's"
        )
    return reasons


def loss_gap(run: Trajectory, reference: Trajectory) -> float:
    """Largest difference between the two loss trajectories."""
    return max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True))


def _loss_span(reference: Trajectory) -> float:
    return max(reference.losses) - min(reference.losses)


def _fall(run: Trajectory) -> float:
    return run.losses[0] - run.losses[-1]


def _short(losses: Sequence[float]) -> str:
    return f"[{losses[0]:.3f} ... {losses[-1]:.3f}]"


def reference_trajectory(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], steps: int
) -> Trajectory:
    """Train the fp32 ``model`` with torch AdamW: what every method is held to."""
    if any(p.dtype != torch.float32 for p in model.parameters()):
        raise ValueError("model: the reference needs fp32 weights")
    optimizer = torch.optim.AdamW(model.parameters(), **GATE_HYPER.adamw)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run_trajectory(model, step, batches, steps)
