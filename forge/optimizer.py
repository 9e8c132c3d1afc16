"""Optimizers whose update runs inside the backward pass."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from operator import is_
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from forge.embedding import ForgeEmbedding, fuse_embeddings
from forge.kernels.wgrad_auto import check_path
from forge.linear import ForgeLinear, Slot, fuse_linears, slot_of
from forge.optim.clock import Clock
from forge.optim.rules import Rule
from forge.optim.states import (
    FORMATS,
    check_format,
    check_states,
    convert_states,
    stored_names,
)
from forge.queue import UpdateQueue, check_single_process

_DTYPES = (torch.bfloat16, torch.float32)
_NOT_NEGATIVE = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "weight_decay": "weight_decay value",
    "momentum": "momentum value",
    "alpha": "alpha value",
    "lr_decay": "lr_decay value",
    "initial_accumulator_value": "initial_accumulator_value value",
    "momentum_decay": "momentum_decay value",
}


class Options(TypedDict, total=False):
    """Keyword arguments of every :class:`ForgeOptimizer`, documented there."""

    model: nn.Module | None
    states: str
    rounding: str
    seed: int
    path: str


class ForgeOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that update during ``loss.backward()``. Subclasses choose the rule.

    A parameter is updated, and its gradient freed, at the moment its gradient is complete. For the
    ``nn.Linear`` layers of ``model`` the weight gradient is never formed: one kernel computes each
    tile of it and applies the update. That of its ``nn.Embedding`` layers, and of a head tied to
    one, is formed and applied in slices (:mod:`forge.kernels.row_update`). ``step()`` updates what
    backward did not (gradients assigned by hand) and ends the step.

    One backward a step: a second one before ``step()`` raises, the weights have moved already.

    Args:
        params: a module (its ``nn.Linear`` layers are fused), or what ``torch.optim`` takes:
            parameters, named parameters or param groups.
        defaults: hyperparameters of groups that do not set their own.
        model: with ``params`` given as parameters or groups, the module whose ``nn.Linear`` layers
            are fused.
        states: how optimizer states are stored: ``"auto"`` (each parameter's dtype), ``"bf16"``,
            ``"fp32"``, or ``"int8"``: codes of 8 bits with a scale for every 128 values of a row,
            of every parameter (matrices that are a few columns wide spend more on scales).
        rounding: of what is stored in bf16 or 8 bits: ``"stochastic"`` (unbiased; small updates
            are not lost) or ``"nearest"``, which 8 bits refuse: slow averages would stand still.
        seed: of stochastic rounding.
        path: how weight gradient and update of linear layers are computed: ``"auto"`` (by token
            count and shape, as measured), ``"tiles"``, ``"scratch"`` or ``"hopper"``; see
            :mod:`forge.kernels.wgrad_auto`. Weights of embeddings have one way.

    Raises:
        ValueError: a hyperparameter out of range; a parameter held by another such optimizer.
        TypeError: a parameter that is not a plain bf16 or fp32 tensor.
        NotImplementedError: more than one process.
    """

    rule: Rule
    # torch's settings that the rule leaves no choice in, so that none is silently ignored.
    fixed: dict[str, Any] = {"maximize": False}

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        model: nn.Module | None = None,
        states: str = "auto",
        rounding: str = "stochastic",
        seed: int = 0,
        path: str = "auto",
    ) -> None:
        check_format(states, rounding)
        _check_hyper(defaults)
        _check_not_distributed(model if model is not None else params)
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                raise ValueError("model=: pass the module once, as the first argument")
            model, params = params, list(params.named_parameters())
        if not -(2**31) <= seed < 2**31:
            raise ValueError(f"seed={seed}: must fit in 32 bits")
        self.states = states
        self.rounding = rounding
        self.seed = seed
        self._slots: list[Slot] = []
        self._salt = 0
        self._members: list[tuple[int, int]] = []  # group and parameter
        self._clocks: list[Clock] = []
        self._names = {id(p): n for n, p in model.named_parameters()} if model is not None else {}
        self._layers: list[nn.Module] = []
        self._state: defaultdict[Tensor, Any] = defaultdict(dict)
        stochastic = rounding == "stochastic"
        self._queue = UpdateQueue(self.rule, states, stochastic, path, self._state)
        super().__init__(params, defaults)
        self.state = self._state
        if model is not None:
            self._layers = [*fuse_linears(model), *fuse_embeddings(model)]
        try:
            for layer in self._layers:
                if isinstance(layer, ForgeLinear):
                    dtype = FORMATS[states] or layer.weight.dtype
                    check_path(path, layer.weight, dtype, len(self.rule.states))
        except ValueError:
            self.release()
            raise

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in ``torch.optim.Optimizer``. Its layers are not fused.

        Raises:
            ValueError: a hyperparameter is out of range; a parameter belongs to another optimizer
                of this package, or cannot be updated in place (not dense in memory).
            TypeError: a parameter's dtype or type is not supported.
        """
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        names = group.get("param_names")
        try:
            self._check_group(number, group)
            found = [
                (p, names[i] if names else self._names.get(id(p), f"parameter {i} of the group"))
                for i, p in enumerate(group["params"])
            ]
            if len({id(param) for param, _ in found}) < len(found):
                raise ValueError(f"param group {number}: a parameter is in it twice")
            for param, name in found:
                _check_parameter(param, name)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        clocks: dict[torch.device, Clock] = {}
        for param, name in found:
            clock = clocks.get(param.device)
            if clock is None:
                clock = clocks[param.device] = Clock(self.rule, group, param.device, self.seed)
            slot = Slot(param, name, self._salt, clock, self)
            # Every element has a number of its own, up to 2^32 of them; in 256s, so that the low
            # byte is the column of a tile. As a signed 32-bit number.
            salt = self._salt + -(-param.numel() // 256) * 256
            self._salt = (salt + 2**31) % 2**32 - 2**31
            self._slots.append(slot)
            if param.requires_grad:
                slot.attach(self._queue)
        self._clocks.extend(clocks.values())
        self._members += [(id(group), id(param)) for param, _ in found]

    def _check_group(self, number: int, group: dict[str, Any]) -> None:
        """Refuse hyperparameters out of range and settings that the rule does not follow."""
        _check_hyper(group)
        for key, value in self.fixed.items():
            if group.get(key, value) != value:
                raise ValueError(
                    f"param group {number}: {key}={group[key]}, but this {type(self).__name__} "
                    f"was built for {key}={value}"
                )

    def release(self) -> None:
        """Give the parameters back: hooks are removed and fused layers are plain ones again."""
        for slot in self._slots:
            slot.detach()
        for layer in self._layers:
            if type(layer) in (ForgeLinear, ForgeEmbedding):
                layer.__class__ = type(layer).__base__  # type: ignore[assignment]
        self._slots, self._clocks, self._layers = [], [], []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End the step: update parameters that still hold a gradient, then advance the count.

        Args:
            closure: re-evaluates the model and runs backward; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not any(clock.running for clock in self._clocks):
            self.check_unedited()  # no backward did
        for slot in self._slots:
            grad = slot.param.grad
            if grad is not None and not slot.updated:
                # Autograd did not call: assigned by hand, just unfrozen, or moved since.
                if not slot.attached():
                    self._renew(slot)
                self._queue.push(slot, grad)
        self._queue.flush()
        self._split_clocks()
        late = [clock for clock in self._clocks if clock.running and clock.outdated()]
        for clock in self._clocks:
            clock.running = False
        for slot in self._slots:
            slot.updated = False
        if late:
            raise RuntimeError(
                "a param group's hyperparameters were changed between backward() and step(): the "
                "weights had been updated with the old ones; change them before backward()"
            )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``torch.optim.Optimizer``: discards gradients.

        Raises:
            RuntimeError: gradients of this step have been applied already, and cannot be discarded.
        """
        self._queue.discard()
        applied = [slot for slot in self._slots if slot.updated]
        for slot in self._slots:
            slot.factors = []
        super().zero_grad(set_to_none)
        if applied:
            raise RuntimeError(
                f"zero_grad() before step(): {len(applied)} parameters ({applied[0].name!r} ...) "
                "were updated inside backward already, which cannot be undone; step() ends the "
                "step. To keep a network still while another one trains through it, freeze it "
                "with requires_grad_(False)"
            )

    def _check_held(self) -> None:
        if not self._slots and any(group["params"] for group in self.param_groups):
            raise RuntimeError("this optimizer was released: build a new one")

    def check_unedited(self) -> None:
        """Refuse what the hooks would not notice; follow replaced states and layouts."""
        self._check_held()
        groups = [(id(group), id(p)) for group in self.param_groups for p in group["params"]]
        if groups != self._members:
            raise RuntimeError(
                "param_groups was edited: use add_param_group, or release() this optimizer and "
                "build a new one (load_state_dict keeps the states)"
            )
        self._queue.state = self.state
        names = stored_names(self.rule, self.states)
        restarted: dict[tuple, Clock] = {}
        for slot in self._slots:
            target = slot.target
            if target is None:
                continue
            param, stored = slot.param, self.state.get(slot.param)
            if not stored:
                # Its state was cleared: as in torch, its count starts again.
                key = (id(slot.clock.group), param.device)
                if key not in restarted:
                    clock = Clock(self.rule, slot.clock.group, param.device, self.seed)
                    restarted[key] = clock
                    self._clocks.append(clock)
                slot.clock, slot.target = restarted[key], None
            elif (
                not all(map(is_, map(stored.get, names), target.states + target.scales))
                or param.stride() != target.stride
            ):
                slot.target = None

    @torch.no_grad()
    def _renew(self, slot: Slot) -> None:
        """Follow a parameter that was unfrozen, converted or moved after the optimizer was built.

        Raises:
            TypeError: its new dtype is not supported.
        """
        param = slot.param
        _check_parameter(param, slot.name, attached=True)
        if slot.clock.step.device != param.device:
            twins = (c for c in self._clocks if c.follows(slot.clock, param.device))
            clock = next(twins, None)
            if clock is None:
                clock = slot.clock.on(param.device)
                self._clocks.append(clock)
            self._move(slot, clock)
        slot.target = None
        if param.requires_grad:
            slot.attach(self._queue)

    def _split_clocks(self) -> None:
        """Parameters that a running clock's step left out keep their own, smaller count."""
        left: dict[int, Clock] = {}
        for slot in self._slots:
            clock = slot.clock
            if clock.running and not slot.updated:
                if id(clock) not in left:
                    left[id(clock)] = clock.behind()
                self._move(slot, left[id(clock)])
        self._clocks.extend(left.values())

    def _move(self, slot: Slot, clock: Clock) -> None:
        slot.clock = clock
        if self.state.get(slot.param):
            self.state[slot.param].update(clock.counts())

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim.Optimizer``, in the layout of the same rule's torch optimizer.

        With ``states="int8"``, ``<state>_code`` and ``<state>_scale`` stand for a state: a torch
        optimizer does not know them, one of this package with other ``states`` does.

        Tensors alias the live states, except ``step`` and the like: parameters share those here,
        and an optimizer that loads them would advance them once for each parameter.
        """
        result = super().state_dict()
        names = stored_names(self.rule, self.states)
        result["state"] = {
            key: {k: v if k in names else v.clone() for k, v in state.items()}
            for key, state in result["state"].items()
        }
        result["param_groups"] = [{**self.fixed, **group} for group in result["param_groups"]]
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, or the state of the same rule's torch optimizer.

        Unlike torch's, which casts every state to the parameter's dtype, it keeps states in this
        optimizer's format, whichever they were saved in (to nearest). Everything is checked before
        anything is changed.

        Optimizers that count no steps (torch's SGD) save no ``step``: their parameters' states
        count as one step old, which is all that such a rule asks.

        Raises:
            ValueError: groups, settings or shapes do not match; the message names the parameter.
            KeyError: a state is missing.
        """
        self._check_held()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"state_dict has {len(groups)} param groups, the optimizer {len(self.param_groups)}"
            )
        loaded: dict[int, dict[str, Any]] = {}
        names = {id(s.param): s.name for s in self._slots}
        for i, (mine, theirs) in enumerate(zip(self.param_groups, groups, strict=True)):
            if len(mine["params"]) != len(theirs["params"]):
                raise ValueError(
                    f"param group {i}: state_dict has {len(theirs['params'])} parameters, "
                    f"the optimizer {len(mine['params'])}"
                )
            self._check_group(i, theirs)
            for param, key in zip(mine["params"], theirs["params"], strict=True):
                state = _read_state(state_dict["state"].get(key, {}), names[id(param)], self.rule)
                if state:
                    check_states(self.rule, self.states, param, state, names[id(param)])
                    loaded[id(param)] = state
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            # In place: schedulers and clocks hold these dicts.
            settings = {k: v for k, v in theirs.items() if k not in ("params", "param_names")}
            mine.update(copy.deepcopy(settings))
        self._restore(loaded)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @torch.no_grad()
    def _restore(self, loaded: dict[int, dict[str, Any]]) -> None:
        self._queue.discard()
        self.state.clear()
        clocks: dict[tuple, Clock] = {}
        for slot in self._slots:
            param, state = slot.param, loaded.get(id(slot.param))
            group = slot.clock.group
            steps = float(state["step"]) if state else 0.0
            carried = [float(state[name]) for name in self.rule.carried] if state else []
            key = (id(group), param.device, steps, *carried)
            if key not in clocks:
                clocks[key] = Clock(self.rule, group, param.device, self.seed, steps, carried)
            slot.clock = clocks[key]
            slot.updated, slot.target, slot.factors = False, None, []
            if state:
                mine = convert_states(self.rule, self.states, param, state)
                self.state[param] = {**slot.clock.counts(), **mine}
        self._clocks = list(clocks.values())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} is tied to its model's parameters by hooks and cannot be "
            "copied or pickled: build a new one on the copied model, then "
            "load_state_dict(old.state_dict())"
        )


def _check_not_distributed(model: Any) -> None:
    check_single_process()
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise NotImplementedError(
            f"{type(model).__name__}: several processes are not supported; pass the module inside"
        )


def _check_parameter(param: Tensor, name: str, attached: bool = False) -> None:
    """Refuse what the kernels cannot update, naming the parameter."""
    if not attached and slot_of(param) is not None:
        raise ValueError(
            f"{name!r} already belongs to a ForgeOptimizer: call release() on that one first"
        )
    if not param.requires_grad:
        return
    if type(param).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise TypeError(f"{name!r} is a {type(param).__name__}: only plain tensors are supported")
    if param.dtype not in _DTYPES:
        raise TypeError(
            f"{name!r} is {param.dtype}: weights must be bfloat16 or float32 "
            "(for float16 compute, keep float32 weights and use torch.autocast)"
        )
    if torch.empty_like(param).stride() != param.stride():
        raise ValueError(f"{name!r} is not dense in memory: pass param.contiguous()")


def _check_hyper(settings: dict[str, Any]) -> None:
    """Raise ValueError, in torch's words, when a hyperparameter is out of range."""
    for key, words in _NOT_NEGATIVE.items():
        value = settings.get(key, 0.0)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"Tensor {key} must be 1-element")
        elif not value >= 0.0:
            raise ValueError(f"Invalid {words}: {value}")
    for i, beta in enumerate(settings.get("betas", ())):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")


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
    # torch's Adagrad saves what its states start with. Here they start at zero.
    return state if float(state["step"]) > 0 else None
