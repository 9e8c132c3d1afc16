"""Updates that are due: collected while backward runs, launched a few layers at a time."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from forge.deferred import DeferredGradient, refuse_second_backward
from forge.kernels.apply_rule import apply_rule
from forge.kernels.column_sum import column_sums
from forge.kernels.rms_norm import NormAgain
from forge.kernels.row_update import Rows, add_product, is_rows, row_update
from forge.kernels.rows_apart import RowsApart
from forge.kernels.runtime import as_rows
from forge.kernels.target import Target
from forge.kernels.wgrad_auto import choose_path, wgrad_update_auto
from forge.linear import Factors, Slot
from forge.optim.clock import Clock
from forge.optim.rules import Rule
from forge.optim.states import convert_states, new_states, stored_names

# A launch for every small layer costs more host time than the layer's update takes on the GPU. This
# much of gradients, and as much of the factors of fused ones, may wait for the next launch.
QUEUE_BYTES = 128 * 2**20
# In a captured step the host does not count, and long chains of launches take the GPU least.
CAPTURED_BYTES = 640 * 2**20

# Looked up once: they run for every parameter of every backward, and the host is what an eager step
# waits for.
_current_task = torch._C._current_graph_task_id
_grad_enabled = torch.is_grad_enabled


@dataclass
class _Waiting:
    entries: list[tuple[Slot, Factors, Tensor | None]] = field(default_factory=list)
    bytes: int = 0


@dataclass
class _Batch:
    """What one launch takes: gradients, or output gradients and inputs (parts, of vectors)."""

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
        self.deferred = False  # whether updates wait for step()
        self.state = state
        self._fused = _Waiting()  # weights whose gradient is a product of factors
        self._plain = _Waiting()  # parameters whose gradient exists
        self._task = -1
        # Backwards of several threads may share the optimizer. Appending to a list needs no lock.
        self._lock = Lock()

    def complete(self, slot: Slot) -> None:
        """Called by the autograd engine when a backward has completed the gradient of ``slot``."""
        if self.deferred:
            self._defer(slot)
            return
        task = _current_task()
        param, factors = slot.param, slot.factors
        if not param.requires_grad:
            slot.factors = []  # frozen since the forward pass
            return
        if factors and slot.task != task:
            factors = slot.factors = []  # of a backward that failed
        grad = param.grad
        if grad is None and not factors and not _begun(slot):
            return
        if task != self._task or slot.updated or _grad_enabled():
            self._enter(slot, task)
        self.push(slot, grad)

    def _enter(self, slot: Slot, task: int) -> None:
        """Check, before the first update of a backward, what all of them need."""
        if slot.updated or _grad_enabled():
            self._refuse(slot)
        if task != self._task:
            check_single_process()
            owner = slot.owner()
            if owner is not None:
                with self._lock:
                    owner.check_unedited()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)

    def _defer(self, slot: Slot) -> None:
        """Let what backward has collected for ``slot`` wait for ``step()``."""
        if not slot.param.requires_grad:
            slot.factors = []
        if not slot.factors:
            return
        if torch.is_grad_enabled():
            self._refuse(slot)
        factors, slot.factors = slot.factors, []
        grad = slot.param.grad
        if grad is None:
            grad = slot.param.grad = DeferredGradient(slot)
        if isinstance(grad, DeferredGradient):
            grad.factors += factors
        else:
            with torch.no_grad():
                _add(grad, factors)

    def push(self, slot: Slot, grad: Tensor | None) -> None:
        """Queue the update of ``slot`` from what it has collected and from its ``grad``."""
        if isinstance(grad, DeferredGradient):
            grad = slot.take(grad)
        if slot.split is not None and _begun(slot):
            slot.split.check(slot.factors, grad)
        factors, slot.factors = slot.factors, []
        if grad is None:
            waiting = self._plain if slot.param.dim() == 1 else self._fused
            for x, dy, _ in factors:
                waiting.bytes += x.nbytes + dy.nbytes
        else:
            if grad.is_sparse:
                raise RuntimeError(
                    f"{slot.name!r} has a sparse gradient: use sparse=False in its layer"
                )
            waiting = self._plain
            waiting.bytes += grad.nbytes
        # Whoever still asks for it, to clip it, must not find that there is none.
        if self.deferred:
            slot.param.grad = None
        else:
            slot.mark_applied()
        slot.updated = True
        waiting.entries.append((slot, factors, grad))
        if waiting.bytes > QUEUE_BYTES and not (
            self.captured
            and waiting.bytes <= CAPTURED_BYTES
            and torch.cuda.is_current_stream_capturing()
        ):
            self._launch(waiting)

    def discard(self) -> None:
        """Forget every update that is queued: their parameters have not been touched."""
        for waiting in (self._fused, self._plain):
            for slot, _, _ in waiting.entries:
                slot.updated, slot.param.grad = False, None
            waiting.entries, waiting.bytes = [], 0

    def queued(self) -> list[Slot]:
        """The parameters whose update is queued."""
        return [slot for waiting in (self._fused, self._plain) for slot, _, _ in waiting.entries]

    def flush(self) -> None:
        """Launch every queued update."""
        self._launch(self._fused)
        self._launch(self._plain)

    def _launch(self, waiting: _Waiting) -> None:
        with self._lock, torch.no_grad():
            self._launch_locked(waiting)

    def _launch_locked(self, waiting: _Waiting) -> None:
        entries = waiting.entries[:]
        batches: dict[tuple, _Batch] = {}
        last_key: tuple = ()
        fused = waiting is self._fused
        for i, (slot, factors, grad) in enumerate(entries):
            target = slot.target
            if target is None or target.address != slot.param.data_ptr():
                if grad is None and not slot.param.is_contiguous():
                    raise RuntimeError(
                        f"{slot.name!r} was laid out anew while its update was queued: discard it "
                        "with optimizer.zero_grad()"
                    )
                target = slot.target = self._target(slot)
            for x, dy, version in factors:
                if x._version + dy._version != version:
                    _refuse_changed(slot)
                filler = NormAgain.unfilled(x)
                if filler is not None:
                    with _on_stream(slot.stream, x.device):
                        filler.fill()
            if grad is not None:
                if factors:
                    grad = _add(grad, factors)
                key: tuple = (slot.clock, None, grad.dtype, target.dtypes, None)
            elif slot.embeds and (_begun(slot) or any(is_rows(dy) for _, dy, _ in factors)):
                # Updated in slices, not with others.
                key = (slot.clock, slot.stream, None, target.dtypes, slot)
            else:
                if len(factors) > 1:
                    with _on_stream(slot.stream, slot.param.device):
                        factors = [_join(factors)]
                    # The parts go now, not when all entries have been joined.
                    entries[i] = waiting.entries[i] = (slot, factors, grad)
                # Parts of a vector's gradient, x, have no output gradient.
                dtype = factors[0][1].dtype if fused else None
                key = (slot.clock, slot.stream, dtype, target.dtypes, None)
            if key != last_key:
                batch, last_key = batches.setdefault(key, _Batch()), key
            batch.targets.append(target)
            if grad is not None:
                batch.first.append(grad)
                continue
            for x, dy, _ in factors:
                batch.first.append(dy)
                batch.second.append(x)
        # What has raised so far has changed nothing, and its updates can be discarded.
        del waiting.entries[: len(entries)]
        waiting.bytes = 0
        for (clock, stream, *_, alone), batch in batches.items():
            seed = clock.seed if self.stochastic else None
            with _on_stream(stream, batch.targets[0].param.device):
                if not clock.running:
                    clock.begin()
                _forget(clock, batch.targets)
                arguments = (clock.scalars, seed, self.rule.update)
                first, second, targets = batch.first, batch.second, batch.targets
                if alone is not None and alone.split is not None and alone.split.apart is not None:
                    for rows in second:  # none, if nothing that was looked up counts
                        alone.split.apart.update(rows, *arguments)
                elif alone is not None:
                    row_update(first, second, targets[0], *arguments)
                elif fused:
                    wgrad_update_auto(first, second, targets, *arguments, self.path, self.captured)
                else:
                    grads = column_sums(second) if second else first
                    apply_rule(grads, targets, *arguments)
            # The kernels write behind autograd's back: a graph that still holds the old weights
            # must not be differentiated again.
            increment_version([target.param for target in batch.targets])

    def start_split(
        self, slot: Slot, x: Tensor, dy: Tensor, ids: Tensor, first: int, apart: RowsApart | None
    ) -> RowsApart:
        """Update rows of a tied weight from its head's factors, see :class:`SplitUpdate`."""
        if apart is None:
            self._enter(slot, torch._C._current_graph_task_id())
        with self._lock, torch.no_grad():
            target, clock = slot.target, slot.clock
            if target is None or target.address != slot.param.data_ptr():
                target = slot.target = self._target(slot)
            if not clock.running:
                clock.begin()
            if apart is None:
                _forget(clock, [target])
                apart = RowsApart(ids, target)
            apart.keep(x, dy, first)
            if dy.shape[1] < target.param.shape[0]:
                target = target.rows(first, first + dy.shape[1])
            seed = clock.seed if self.stochastic else None
            arguments = (clock.scalars, seed, self.rule.update)
            if choose_path(dy, x, target, self.captured) == "hopper":
                wgrad_update_auto([dy], [x], [target], *arguments, "hopper", self.captured)
            else:
                row_update([dy], [x], target, *arguments)
            increment_version([slot.param])
        return apart

    def _target(self, slot: Slot) -> Target:
        param = slot.param
        state = self.state[param]
        if not state:
            if self.captured and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{slot.name!r} got its first gradient while the step was captured, none in "
                    "the eager one"
                )
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

    def _refuse(self, slot: Slot) -> NoReturn:
        if slot in self.queued():
            raise RuntimeError(
                f"a backward of this step did not finish, and its update of {slot.name!r} is still "
                "queued: discard it with optimizer.zero_grad() (optimizer.step() would apply it). "
                "Or the weight is used inside and outside of a reentrant checkpoint: use "
                "checkpoint(use_reentrant=False)"
            )
        if slot.updated:
            refuse_second_backward(slot.name)
        raise RuntimeError(
            f"create_graph=True: {slot.name!r} is updated inside backward, which cannot be "
            "differentiated; use torch.optim.AdamW"
        )


def _forget(clock: Clock, targets: list[Target]) -> None:
    """Zero the states of which nothing stays in this step, see :class:`~forge.optim.rules.Rule`."""
    for i in clock.forgotten:
        for target in targets:
            target.states[i].zero_()  # also where they are codes: 0 stands for zero


def _begun(slot: Slot) -> bool:
    """Whether the update has been launched but for the rows that an embedding looked up."""
    return slot.split is not None and slot.split.apart is not None


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
    x, dy = (
        torch.cat([t.reshape(t.shape[:-1].numel(), t.shape[-1]) for t in ts]) for ts in (xs, dys)
    )
    return x, dy, x._version + dy._version


def _add(grad: Tensor, factors: Factors) -> Tensor:
    """The gradient of a weight that was also used outside its fused layers."""
    grad = grad.contiguous()
    for x, dy, _ in factors:
        if grad.dim() == 1:
            grad.add_(x.sum(0))
        elif is_rows(dy):
            Rows(dy, x).add_to(grad)
        else:
            add_product(grad, as_rows(dy), as_rows(x))
    return grad
