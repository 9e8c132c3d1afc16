"""An optimizer's state: saved and loaded as the same rule's torch optimizer does."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from forge.checks import as_count
from forge.following import clock_at
from forge.optim.clock import Clock
from forge.optim.rules import Rule
from forge.optim.states import check_states, convert_states

if TYPE_CHECKING:
    from forge.optimizer import ForgeOptimizer

# How states are saved: names, codes, scales, and what `step` counts. In every param group, which
# is what torch.distributed.checkpoint and trainers hand on, while they drop other keys at the top.
FORMAT, FORMAT_KEY = 1, "forge_format"


def detached(optimizer: ForgeOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """``saved``, as torch's ``state_dict`` gives it, without what parameters share here."""
    shared = ("step", *optimizer.rule.carried)
    saved["state"] = {
        key: {k: v.clone() if k in shared else v for k, v in state.items()}
        for key, state in saved["state"].items()
    }
    saved["param_groups"] = [
        {**optimizer.fixed, **group, FORMAT_KEY: FORMAT} for group in saved["param_groups"]
    ]
    return saved


@torch.no_grad()
def load(optimizer: ForgeOptimizer, state_dict: dict[str, Any]) -> None:
    """Take over settings and states of ``state_dict``. Errors as of ``load_state_dict``."""
    loaded = _read(optimizer, state_dict)
    for mine, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        # In place: schedulers and clocks hold these dicts.
        left_out = ("params", "param_names", FORMAT_KEY)
        settings = {k: v for k, v in theirs.items() if k not in left_out}
        mine.update(copy.deepcopy(settings))
    optimizer._queue.discard()
    optimizer.state.clear()
    optimizer._clocks, optimizer._seen = [], []
    rule = optimizer.rule
    clocks: dict[tuple, Clock] = {}
    for slot in optimizer._slots:
        param, state = slot.param, loaded.get(id(slot.param))
        steps = state["step"] if state else 0.0
        carried = [state[name] for name in rule.carried] if state else []
        slot.clock = clock_at(optimizer, clocks, slot, steps, carried)
        slot.updated, slot.target, slot.factors = False, None, []
        if state:
            states = convert_states(rule, optimizer.states, param, state)
            optimizer.state[param] = {**slot.clock.counts(), **states}


def _read(optimizer: ForgeOptimizer, state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The states in ``state_dict`` by parameter id, checked; changes nothing.

    Parameters that no step has updated are left out.
    """
    for key in ("state", "param_groups"):
        if not isinstance(state_dict, Mapping) or key not in state_dict:
            raise KeyError(f"state_dict has no {key!r}: pass what optimizer.state_dict() returned")
    if not isinstance(state_dict["state"], Mapping):
        raise ValueError("state_dict: 'state' must be a dict of the parameters' states")
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"state_dict has {len(groups)} param groups, the optimizer "
            f"{len(optimizer.param_groups)}"
        )
    loaded: dict[int, dict[str, Any]] = {}
    names = {id(slot.param): slot.name for slot in optimizer._slots}
    for i, (mine, theirs) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key in ("params", *optimizer.defaults):
            if key not in theirs:
                raise KeyError(f"param group {i} of the state_dict has no {key!r}")
        if len(mine["params"]) != len(theirs["params"]):
            raise ValueError(
                f"param group {i}: state_dict has {len(theirs['params'])} parameters, "
                f"the optimizer {len(mine['params'])}"
            )
        # Without one: of a torch optimizer, whose layout this is.
        version = theirs.get(FORMAT_KEY, FORMAT)
        if version != FORMAT:
            raise ValueError(
                f"param group {i}: {FORMAT_KEY}={version!r}, but this forge-optim reads {FORMAT}: "
                "load it with the release that saved it, or a later one"
            )
        optimizer._check_group(i, theirs)
        for param, key in zip(mine["params"], theirs["params"], strict=True):
            name = names[id(param)]
            state = _read_state(state_dict["state"].get(key, {}), name, optimizer.rule)
            if state:
                check_states(optimizer.rule, optimizer.states, param, state, name)
                loaded[id(param)] = state
    return loaded


def _read_state(state: dict[str, Any], name: str, rule: Rule) -> dict[str, Any] | None:
    """A parameter's part of a state_dict; None when no step has updated it."""
    if not rule.counted:
        state = {key: value for key, value in state.items() if value is not None}
        state = state and {"step": 1.0, **state}
    if not state:
        return None
    for key in ("step", *rule.carried):
        if key not in state:
            raise KeyError(f"{name!r}: the state_dict has no {key!r}, which {rule.name} needs")
        count = as_count(state[key])
        if count is None:
            raise ValueError(f"{name!r}: {key!r} is {state[key]!r}: must be a number from 0 on")
        state = {**state, key: count}
    # torch's Adagrad saves what its states start with. Here they start at zero.
    return state if state["step"] > 0 else None
