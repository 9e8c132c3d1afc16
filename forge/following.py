"""Which clock counts a parameter's steps: followed when states are replaced, parameters moved.

Parameters that advance together share a :class:`~forge.optim.clock.Clock`. One whose state somebody
has replaced, that lives on another device now, or that a step left out gets another.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from forge.checks import check_parameter, read_count, refuse_edited
from forge.linear import Slot
from forge.optim.clock import Clock
from forge.optim.states import check_stored, stored_names

if TYPE_CHECKING:
    from forge.optimizer import ForgeOptimizer


def follow(optimizer: ForgeOptimizer, edited: Sequence[Clock]) -> None:
    """Follow states, counts and layouts that are not those of the last step, or refuse them.

    Args:
        edited: clocks whose counts somebody has written to.
    """
    names = stored_names(optimizer.rule, optimizer.states)
    made: dict[tuple, Clock] = {}
    for slot in optimizer._slots:
        param, target = slot.param, slot.target
        stored = optimizer.state.get(param)
        if not stored:
            if target is not None:
                # Its state was cleared: as in torch, its count starts again.
                slot.clock, slot.target = clock_at(optimizer, made, slot, 0.0, ()), None
            continue
        if not slot.clock.shown_in(stored):
            step, *carried = (read_count(slot, stored, name) for name in slot.clock.counts())
            _move(optimizer, slot, clock_at(optimizer, made, slot, step, carried))
        elif slot.clock in edited:
            refuse_edited(slot)
        if (
            target is None
            or not same([stored.get(name) for name in names], target.states + target.scales)
            or param.stride() != target.stride
        ):
            slot.target = None
            check_stored(optimizer.rule, optimizer.states, param, stored, slot.name)


def clock_at(
    optimizer: ForgeOptimizer,
    made: dict[tuple, Clock],
    slot: Slot,
    step: float,
    carried: Sequence[float],
) -> Clock:
    """A clock of the slot's group and device at these counts, one for all that ask."""
    key = (id(slot.clock.group), slot.param.device, step, *carried)
    if key not in made:
        group, device = slot.clock.group, slot.param.device
        made[key] = Clock(optimizer.rule, group, device, optimizer.seed, step, carried)
        optimizer._clocks.append(made[key])
    return made[key]


@torch.no_grad()
def renew(optimizer: ForgeOptimizer, slot: Slot) -> None:
    """Follow a parameter that was unfrozen, converted or moved after the optimizer was built.

    Raises:
        TypeError: its new dtype is not supported.
    """
    param = slot.param
    check_parameter(param, slot.name, attached=True)
    if slot.clock.step.device != param.device:
        twins = (c for c in optimizer._clocks if c.follows(slot.clock, param.device))
        clock = next(twins, None)
        if clock is None:
            clock = slot.clock.on(param.device)
            optimizer._clocks.append(clock)
        _move(optimizer, slot, clock)
    slot.target = None
    if param.requires_grad:
        slot.attach(optimizer._queue)


def leave_behind(optimizer: ForgeOptimizer, slots: Sequence[Slot]) -> None:
    """Those of ``slots`` that a running clock's step left out keep their own, smaller count."""
    left: dict[int, Clock] = {}
    for slot in slots:
        clock = slot.clock
        if clock.running and not slot.updated:
            if optimizer._queue.captured and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{slot.name!r} got no gradient while the step was captured, but one in "
                    "the eager one"
                )
            stored = optimizer.state.get(slot.param)
            if stored and not clock.shown_in(stored):
                continue  # another count was put there: followed at the next check
            if id(clock) not in left:
                left[id(clock)] = clock.behind()
            _move(optimizer, slot, left[id(clock)])
    optimizer._clocks.extend(left.values())


def _move(optimizer: ForgeOptimizer, slot: Slot, clock: Clock) -> None:
    slot.clock = clock
    if optimizer.state.get(slot.param):
        optimizer.state[slot.param].update(clock.counts())


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether ``a`` and ``b`` hold the same objects in the same order."""
    return len(a) == len(b) and all(map(is_, a, b))
