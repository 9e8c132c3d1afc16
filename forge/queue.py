"""Updates that are due: collected while backward runs, launched a few layers at a time."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from forge.kernels.apply_rule import apply_rule
from forge.kernels.row_update import Rows, add_product, is_rows, row_update
from forge.kernels.runtime import as_rows
from forge.kernels.target import Target
from forge.kernels.wgrad_auto import wgrad_update_auto
from forge.linear import Factors, Slot
from forge.optim.rules import Rule
from forge.optim.states import convert_states, new_states, stored_names

# A launch for every small layer costs more host time than the layer's update takes on the GPU. This
# much of gradients, and as much of the factors of fused ones, may wait for the next launch.
QUEUE_BYTES = 128 * 2**20


@dataclass
class _Waiting:
    entries: list[tuple[Slot, Factors, Tensor | None]] = field(default_factory=list)
    bytes: int = 0


@dataclass
class _Batch:
    """What one launch takes: gradients, or output gradients and inputs."""

    targets: list[Target] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)


class UpdateQueue:
    """Takes parameters whose gradient is complete, updates them, frees the gradient.

    Args:
        rule: the update.
        states: storage format of the states.
        stochastic: stochastic rounding of what is stored in bf16.
        path: of fused weights, see :mod:`forge.kernels.wgrad_auto`.
        state: the optimizer's state by parameter; filled when a parameter is first updated.
    """

    def __init__(
        self,
        rule: Rule,
        states: str,
        stochastic: bool,
        path: str,
        state: MutableMapping[Tensor, Any],
    ) -> None:
        self.rule = rule
        self.states = states
        self.stochastic = stochastic
        self.path = path
        self.captured = False  # whether a CUDA graph is to replay the launches
        self.state = state
        self._fused = _Waiting()  # weights whose gradient is a product of factors
        self._plain = _Waiting()  # parameters whose gradient exists
        self._task = -1

    def complete(self, slot: Slot) -> None:
        """Called by the autograd engine when a backward has completed the gradient of ``slot``."""
        # Runs for every parameter of every backward, on the host that an eager step waits for.
        task = torch._C._current_graph_task_id()
        if slot.factors and slot.task != task or not slot.param.requires_grad:
            slot.factors = []  # of a backward that failed, or frozen since the forward pass
        grad = slot.param.grad
        if grad is None and not slot.factors or not slot.param.requires_grad:
            return
        if slot.updated or torch.is_grad_enabled():
            _refuse(slot)
        if task != self._task:
            check_single_process()
            owner = slot.owner()
            if owner is not None:
                owner.check_unedited()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        waiting = self.push(slot, grad)
        if waiting.bytes > QUEUE_BYTES:
            self._launch(waiting)

    def push(self, slot: Slot, grad: Tensor | None) -> _Waiting:
        """Queue the update of ``slot`` from what it has collected and from its ``grad``."""
        factors, slot.factors = slot.factors, []
        if grad is None:
            waiting = self._fused
            for x, dy, _ in factors:
                waiting.bytes += x.nbytes + dy.nbytes
        else:
            if grad.is_sparse:
                raise RuntimeError(
                    f"{slot.name!r} has a sparse gradient: use sparse=False in its layer"
                )
            waiting = self._plain
            waiting.bytes += grad.nbytes
            slot.param.grad = None
        slot.updated = True
        waiting.entries.append((slot, factors, grad))
        return waiting

    def discard(self) -> None:
        """Forget every update that is queued: their parameters have not been touched."""
        for waiting in (self._fused, self._plain):
            for slot, _, _ in waiting.entries:
                slot.updated = False
            waiting.entries, waiting.bytes = [], 0

    def flush(self) -> None:
        """Launch every queued update."""
        self._launch(self._fused)
        self._launch(self._plain)

    @torch.no_grad()
    def _launch(self, waiting: _Waiting) -> None:
        entries, waiting.entries, waiting.bytes = waiting.entries, [], 0
        batches: dict[tuple, _Batch] = {}
        last_key: tuple = ()
        for slot, factors, grad in entries:
            target = slot.target
            if target is None or target.address != slot.param.data_ptr():
                target = slot.target = self._target(slot)
            for x, dy, version in factors:
                if x._version + dy._version != version:
                    _refuse_changed(slot)
            alone: Slot | None = None
            key: tuple
            if grad is not None:
                if factors:
                    grad = _add(grad, factors)
                key = (slot.clock, None, grad.dtype, target.dtypes, alone)
            else:
                if any(is_rows(dy) for _, dy, _ in factors):
                    alone = slot  # updated in slices, not with others
                elif len(factors) > 1:
                    factors = [_join(factors)]
                key = (slot.clock, slot.stream, factors[0][1].dtype, target.dtypes, alone)
            if key != last_key:
                batch, last_key = batches.setdefault(key, _Batch()), key
            batch.targets.append(target)
            if grad is None:
                batch.first += [dy for _, dy, _ in factors]
                batch.second += [x for x, _, _ in factors]
            else:
                batch.first.append(grad)
        for (clock, stream, *_, alone), batch in batches.items():
            seed = clock.seed if self.stochastic else None
            with _on_stream(stream, batch.targets[0].param.device):
                if not clock.running:
                    clock.begin()
                arguments = (clock.scalars, seed, self.rule.update)
                first, second, targets = batch.first, batch.second, batch.targets
                if alone is not None:
                    row_update(first, second, targets[0], *arguments)
                elif waiting is self._fused:
                    wgrad_update_auto(first, second, targets, *arguments, self.path, self.captured)
                else:
                    apply_rule(first, targets, *arguments)
            # The kernels write behind autograd's back: a graph that still holds the old weights
            # must not be differentiated again.
            increment_version([target.param for target in batch.targets])

    def _target(self, slot: Slot) -> Target:
        param = slot.param
        state = self.state[param]
        if not state:
            state.update(slot.clock.counts(), **new_states(self.rule, self.states, param))
        names, count = stored_names(self.rule, self.states), len(self.rule.states)
        if any(
            state[name].device != param.device or state[name].stride() != param.stride()
            for name in names[:count]
        ):
            # The parameter was moved or laid out anew.
            if self.states == "int8":
                state.update(convert_states(self.rule, self.states, param, state))
            else:
                for name in names:
                    stored = state[name]
                    state[name] = torch.empty_like(param, dtype=stored.dtype).copy_(stored)
        stored = [state[name] for name in names]
        return Target(param, stored[:count], slot.salt, stored[count:])


def _refuse(slot: Slot) -> NoReturn:
    if slot.updated:
        raise RuntimeError(
            f"second backward before step(): {slot.name!r} was already updated in this step. "
            "Call optimizer.step() after every backward; to accumulate, put the micro-batches "
            "into one batch, or use torch.optim.AdamW. (A weight used in several reentrant "
            "checkpoints counts too: use checkpoint(use_reentrant=False).)"
        )
    raise RuntimeError(
        f"create_graph=True: {slot.name!r} is updated inside backward, which cannot be "
        "differentiated; use torch.optim.AdamW"
    )


def _on_stream(stream: int | None, device: torch.device) -> AbstractContextManager:
    """Context in which work goes to the stream that wrote the factors.

    The engine runs the hook on the stream on which the optimizer was built, and makes it wait for
    gradients, but it knows nothing of factors.
    """
    if stream is None or stream == torch._C._cuda_getCurrentRawStream(device.index):
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))


def _refuse_changed(slot: Slot) -> NoReturn:
    raise RuntimeError(
        f"{slot.name!r}: its layer's input or output gradient was changed in place after the "
        "layer's backward, and its weight gradient is formed a little later; avoid the in-place "
        "operation"
    )


def check_single_process() -> None:
    """Raise NotImplementedError when there are several processes."""
    distributed = torch.distributed
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        raise NotImplementedError(
            "updates inside backward would use each rank's own gradient: several processes are not "
            "supported; use torch.optim.AdamW(fused=True)"
        )


def _join(factors: Factors) -> tuple[Tensor, Tensor, int]:
    """One pair ``(x, dy)`` whose product is the sum over all uses, and its version."""
    # dy1^T x1 + dy2^T x2 is one product over the tokens of both.
    xs, dys, _ = zip(*factors, strict=True)
    x, dy = (torch.cat([t.reshape(-1, t.shape[-1]) for t in ts]) for ts in (xs, dys))
    return x, dy, x._version + dy._version


def _add(grad: Tensor, factors: Factors) -> Tensor:
    """The gradient of a weight that was also used outside its fused layers."""
    grad = grad.contiguous()
    for x, dy, _ in factors:
        if is_rows(dy):
            Rows(dy, x).add_to(grad)
        else:
            add_product(grad, as_rows(dy), as_rows(x))
    return grad
