"""One row of ``forge-bench validate``: a method trains a model, the held-out loss is followed."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forge.harness.environment import one_line
from forge.harness.execution import (
    Batch,
    Step,
    UnsupportedExecution,
    build_split_step,
    build_step,
)
from forge.harness.records import STATUSES, check_kinds, load_lines
from forge.harness.rows import Row, cannot_run
from forge.harness.validate_models import place
from forge.optim.registry import REGISTRY, find
from forge.optim.spec import Hyper, OptimizerSpec, backward_then_step

RECORDS_FILE = "fidelity.jsonl"
REFERENCE = "fp32-master"
METHODS = (REFERENCE, "adamw-fused", "forge-bf16", "forge-int8", "bnb-adamw8bit", "flashoptim")
# The loss is read, which waits for the device, every so many steps.
LOOK = 50


@dataclass(frozen=True)
class Record:
    """What one method did to one model at one rate, with one seed. Losses are nats a token.

    Attributes:
        model: as ``--model`` names it; ``model_name`` is what tables show.
        train_loss: mean over the last ``tail`` steps; each loss is before the step's update.
        heldout_loss: of the weights after the last step, on the fixed held-out batches, in fp32.
        train_losses: of every step.
        heldout: ``[step, loss]``, before training (step 0), on the way and at the end.
        epochs: how often the training text was read; above 1 it was repeated.
        execution: ``eager``, ``cuda_graph``, or ``split``: forward and backward are a graph, the
            optimizer's step is launched eagerly.
        data: fingerprints of the training and the held-out tokens.
    """

    run_id: str
    model: str
    model_name: str
    key: str
    method: str
    states: str
    lr: float
    seed: int
    steps: int
    batch: int
    seq: int
    status: str
    notes: str
    date: str
    hardware: str
    device: str
    train_loss: float | None = None
    heldout_loss: float | None = None
    tail: int = 0
    train_losses: list[float] = field(default_factory=list)
    heldout: list[list[float]] = field(default_factory=list)
    epochs: float | None = None
    execution: str = ""
    seconds: float | None = None
    data: str = ""
    environment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        check_kinds(self)
        if self.status == "ok" and (self.heldout_loss is None or self.train_loss is None):
            raise ValueError(f"{self.id}: status ok needs losses")

    @property
    def id(self) -> str:
        """``model/method/lr/seed``."""
        return f"{self.model_name}/{self.key}/{self.lr:g}/seed {self.seed}"

    @property
    def done(self) -> tuple[str, str, float, int]:
        """What no two records of a run share."""
        return (self.model, self.key, self.lr, self.seed)


def read(folder: Path) -> tuple[list[Record], list[str]]:
    """The records of a run, and a message for every line that could not be read."""
    return load_lines(folder / RECORDS_FILE, Record, lambda record: (record.done, record.id))


def in_order(found: Sequence[Record]) -> list[Record]:
    """By model, as they come first, rate, seed and method: whatever order the rows ended in."""
    models = list(dict.fromkeys(record.model for record in found))
    methods = dict.fromkeys((*METHODS, *(record.key for record in found)))

    def place(record: Record) -> tuple[int, float, int, int]:
        return (
            models.index(record.model), -record.lr, record.seed, list(methods).index(record.key)
        )  # fmt: skip

    return sorted(found, key=place)


@dataclass(frozen=True)
class Method:
    """A method of the comparison: a spec of the registry, and the dtype of the weights."""

    key: str
    spec: OptimizerSpec
    name: str
    states: str
    dtype: torch.dtype


def method(key: str) -> Method:
    """:data:`REFERENCE`, or a key of the registry on bf16 weights. Raises ValueError."""
    if key == REFERENCE:
        spec = REGISTRY["adamw-fused"]
        return Method(key, spec, f"{spec.method}, fp32 master weights", "fp32", torch.float32)
    spec = find(key)
    return Method(key, spec, spec.method, spec.states, torch.bfloat16)


class Diverged(RuntimeError):
    """The loss is no number any more."""


class DeviceLost(RuntimeError):
    """A kernel has failed: no row of this process can use the device any more."""


class _Autocast(nn.Module):
    """``model`` in bf16 over fp32 weights."""

    def __init__(self, model: nn.Module, device: str) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, **batch: Tensor) -> Any:
        # No cache: a graph would replay with the copies of its capture.
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            return self.model(**batch)


def eval_steps(steps: int) -> tuple[int, ...]:
    """After which steps the held-out loss is measured; 0 is before the first."""
    return tuple(sorted({round(steps * quarter / 4) for quarter in range(5)}))


@torch.no_grad()
def evaluate(model: nn.Module, judge: nn.Module, batches: Sequence[Batch]) -> float:
    """Mean loss that the weights of ``model`` have in ``judge``; the sum of the losses is fp64.

    The weights alone are compared: in forward passes of their own, bf16 and fp32 differ by some
    tenths of a percent before anything is trained.

    Args:
        judge: the same model in fp32, whose weights are overwritten.
    """
    for mine, theirs in zip(judge.parameters(), model.parameters(), strict=True):
        mine.copy_(theirs)
    judge.eval()
    return torch.stack([judge(**batch).loss for batch in batches]).double().mean().item()


def measure(
    chosen: Method,
    model: nn.Module,
    judge: nn.Module,
    lr: float,
    steps: int,
    train: Sequence[Batch],
    held: Sequence[Batch],
    device: str,
    tick: Callable[[int], None],
) -> dict[str, Any]:
    """Train ``model``, in fp32 on the CPU, for ``steps`` steps. Returns fields of a record.

    Never raises for what is the method's fault: that is a status with its reason in ``notes``.

    Args:
        judge: as of :func:`evaluate`, on ``device``.
        train: batches on ``device``; step i takes ``train[i % len(train)]``.
        tick: called with the number of steps that were done since the last call.
    """
    settled = cannot_run(Row(chosen.spec.key, "torch", "eager"), device)
    if settled:
        return dict(status=settled[0], notes=settled[1])
    fields: dict[str, Any] = {}
    try:
        place(model, device, chosen.dtype)
        if chosen.key == REFERENCE and device == "cuda":
            model = _Autocast(model, device)
        _train(chosen, model, judge, lr, steps, train, held, device, tick, fields)
        return {"status": "ok", "notes": "", **fields}
    except torch.OutOfMemoryError as error:
        return dict(status="oom", notes=one_line(error), **fields)
    except UnsupportedExecution as error:
        return dict(status="unsupported", notes=str(error), **fields)
    except Diverged as error:
        return dict(status="failed", notes=str(error), **fields)
    except Exception as error:  # other people's optimizers may raise anything
        return dict(status="failed", notes=one_line(error), **fields)


def release(device: str) -> None:
    """Free what a row has left behind.

    Raises:
        DeviceLost: so it says.
    """
    gc.collect()
    if device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLost(one_line(error)) from error


def _train(
    chosen: Method,
    model: nn.Module,
    judge: nn.Module,
    lr: float,
    steps: int,
    train: Sequence[Batch],
    held: Sequence[Batch],
    device: str,
    tick: Callable[[int], None],
    fields: dict[str, Any],
) -> None:
    curve: list[list[float]] = fields.setdefault("heldout", [])

    def follow(done: int) -> None:
        loss = evaluate(model, judge, held)
        if not math.isfinite(loss):
            raise Diverged(f"the held-out loss is not finite after step {done}")
        curve.append([done, loss])

    follow(0)
    fields["execution"], step = _step(chosen.spec, model, lr, train[0], device)
    losses = torch.empty(steps, device=device)
    seen: list[float] = fields.setdefault("train_losses", [])
    points, told = eval_steps(steps), 0
    for done in range(1, steps + 1):
        # Copied on the device: a graph's loss is overwritten by the next step.
        losses[done - 1] = step(train[(done - 1) % len(train)])
        if done % LOOK and done not in points:
            continue
        fresh = [round(loss, 6) for loss in losses[told:done].tolist()]
        bad = [told + i for i, loss in enumerate(fresh) if not math.isfinite(loss)]
        if bad:
            raise Diverged(f"the loss is not finite at step {bad[0] + 1}")
        seen.extend(fresh)
        tick(done - told)
        told = done
        if done in points:
            follow(done)
    tail = max(1, steps // 10)
    fields |= dict(train_loss=sum(seen[-tail:]) / tail, heldout_loss=curve[-1][1], tail=tail)


def _step(
    spec: OptimizerSpec, model: nn.Module, lr: float, example: Batch, device: str
) -> tuple[str, Step]:
    captured = device == "cuda" and spec.capturable
    hyper = Hyper(lr=lr, capturable=captured)
    optimizer = spec.build(spec.resolve(), model, hyper)
    if captured:
        return "cuda_graph", build_step(model, optimizer, spec, hyper, "cuda_graph", example)
    if device == "cuda" and spec.train is backward_then_step:
        return "split", build_split_step(model, optimizer, spec, example)
    return "eager", build_step(model, optimizer, spec, hyper, "eager", example)
