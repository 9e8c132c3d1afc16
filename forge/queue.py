"""Updates that are due: collected while backward runs, launched a few layers at a time."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from forge.kernels.apply_rule import apply_rule
from forge.kernels.target import Target
from forge.kernels.wgrad_update import wgrad_update
from forge.linear import Factors, Slot
from forge.optim.rules import Rule
from forge.optim.states import new_states

# A launch for every small layer costs more host time than the layer's update takes on the GPU. This
# much of gradients and of their factors may wait for the next launch.
QUEUE_BYTES = 64 * 2**20


class UpdateQueue:
    """Takes parameters whose gradient is complete, updates them, frees the gradient.

    Args:
        rule: the update.
        states: storage format of the states.
        stochastic: stochastic rounding of what is stored in bf16.
        state: the optimizer's state by parameter; filled when a parameter is first updated.
    """

    def __init__(
        self, rule: Rule, states: str, stochastic: bool, state: MutableMapping[Tensor, Any]
    ) -> None:
        self.rule = rule
        self.states = states
        self.stochastic = stochastic
        self.state = state
        self._due: list[tuple[Slot, Factors, Tensor | None]] = []
        self._bytes = 0
        self._task = -1

    def complete(self, slot: Slot) -> None:
        """Called by the autograd engine when this backward has completed the gradient of ``slot``."""
        grad = slot.param.grad
        if grad is None and not slot.factors:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True: {slot.name!r} is updated inside backward; use torch.optim.AdamW"
            )
        if slot.updated:
            raise RuntimeError(
                f"second backward before step(): {slot.name!r} was already updated in this step. "
                "Call optimizer.step() after every backward; to accumulate, put the micro-batches "
                "into one batch, or use torch.optim.AdamW"
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        self.push(slot)
        if self._bytes > QUEUE_BYTES:
            self.flush()

    def push(self, slot: Slot) -> None:
        """Queue the update of ``slot`` from what it has collected and from its ``.grad``."""
        grad, factors = slot.param.grad, slot.take()
        if grad is not None and grad.is_sparse:
            raise RuntimeError(
                f"{slot.name!r} has a sparse gradient: use sparse=False in its layer"
            )
        for x, dy in factors:
            self._bytes += x.nbytes + dy.nbytes
        if grad is not None:
            self._bytes += grad.nbytes
            slot.param.grad = None
        slot.updated = True
        self._due.append((slot, factors, grad))

    @torch.no_grad()
    def flush(self) -> None:
        """Launch every queued update."""
        due, self._due, self._bytes = self._due, [], 0
        batches: dict[tuple, tuple[list[Target], list[Any]]] = {}
        for slot, factors, grad in due:
            clock, target = slot.clock, slot.target
            if target is None or target.address != slot.param.data_ptr():
                target = slot.target = self._target(slot)
            if not clock.running:
                clock.begin()
            if grad is None:
                gradient = _join(factors)
            else:
                gradient = (_add(grad, factors) if factors else grad,)
            key = (clock, len(gradient), gradient[0].dtype, target.dtypes)
            targets, gradients = batches.setdefault(key, ([], []))
            targets.append(target)
            gradients.append(gradient)
        for (clock, factor_count, *_), (targets, gradients) in batches.items():
            kernel: Any = wgrad_update if factor_count == 2 else apply_rule
            kernel(
                *zip(*gradients, strict=True),
                targets,
                clock.scalars,
                clock.seed if self.stochastic else None,
                self.rule.update,
            )
            # The kernels write behind autograd's back: a graph that still holds the old weights
            # must not be differentiated again.
            increment_version([target.param for target in targets])

    def _target(self, slot: Slot) -> Target:
        state = self.state[slot.param]
        if not state:
            state.update(step=slot.clock.step, **new_states(self.rule, self.states, slot.param))
        return Target(slot.param, [state[name] for name in self.rule.states], slot.salt)


def _join(factors: Factors) -> tuple[Tensor, Tensor]:
    """One pair ``(dy, x)`` whose product is the sum over all uses of the weight."""
    if len(factors) == 1:
        x, dy = factors[0]
        return dy, x
    # dy1^T x1 + dy2^T x2 is one product over the tokens of both.
    xs, dys = zip(*factors, strict=True)
    return tuple(torch.cat([t.reshape(-1, t.shape[-1]) for t in ts]) for ts in (dys, xs))


def _add(grad: Tensor, factors: Factors) -> Tensor:
    """The gradient of a weight that was also used outside its fused layer."""
    for x, dy in factors:
        grad.add_(dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1]))
    return grad
