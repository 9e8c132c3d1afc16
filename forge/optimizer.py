"""Optimizers whose update runs inside the backward pass."""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from forge.checks import (
    check_hyper,
    check_not_distributed,
    check_parameter,
    check_update,
    named_like,
)
from forge.clipping import clip
from forge.embedding import fuse_embeddings
from forge.following import follow, leave_behind, renew, same
from forge.kernels.wgrad_auto import check_name, check_path
from forge.linear import ForgeLinear, Slot, fuse_linears, unfuse
from forge.optim.clock import Clock
from forge.optim.rules import Rule
from forge.optim.states import FORMATS, check_format
from forge.queue import UpdateQueue
from forge.state_dict import detached, load


class Options(TypedDict, total=False):
    """Keyword arguments of every :class:`ForgeOptimizer`, documented there."""

    model: nn.Module | None
    states: str
    rounding: str
    seed: int
    path: str
    update: str
    max_grad_norm: float | None
    on_nonfinite: str


class ForgeOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that update during ``loss.backward()``. Subclasses choose the rule.

    A parameter is updated, and its gradient freed, at the moment its gradient is complete. For the
    ``nn.Linear`` layers of ``model`` the weight gradient is never formed: one kernel computes each
    tile of it and applies the update. That of its ``nn.Embedding`` layers, and of a head tied to
    one, is formed and applied in slices (:mod:`forge.kernels.row_update`). ``step()`` updates what
    backward did not (gradients assigned by hand) and ends the step.

    One backward a step: a second one before ``step()`` raises, the weights have moved already.

    ``state[p]`` may be replaced between steps, also its ``step``, but counts not be written in
    place: parameters share them. Several threads may run backwards of disjoint models.

    Not seen: pre-hooks on the autograd node of a fused weight (``AccumulateGrad``), which get no
    gradient; hooks on the parameter are honoured. ``torch.amp.GradScaler`` finds no gradients to
    unscale; its ``step`` raises.

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
            count and shape), ``"tiles"``, ``"scratch"`` or ``"hopper"``; see
            :mod:`forge.kernels.wgrad_auto`. Weights of embeddings have one way.
        update: ``"backward"``: weights change during ``loss.backward()``. ``"step"``: backward
            keeps each fused layer's input and output gradient, ``tokens * (N + K)`` elements a
            weight [N, K] and micro-batch, and ``step()`` forms each weight gradient and applies
            it. Then gradients accumulate over several backwards, can be clipped by norm
            (``torch.nn.utils.clip_grad_norm_`` works, too), unscaled, read and discarded;
            ``step()`` uses them up.
        max_grad_norm: with ``update="step"``, ``step()`` clips the norm of all gradients together
            to this, as ``clip_grad_norm_`` does. The norm before is in ``optimizer.grad_norm``.
        on_nonfinite: what ``step()`` does when that norm is NaN or infinite: ``"propagate"`` (as
            torch does: it goes into the weights), ``"skip"`` (the gradients are discarded, nothing
            else changes) or ``"raise"``; these two need ``update="step"`` and wait for the GPU.
            With these two, gradients that are all zero change nothing, either: those of a batch
            whose labels are all ignored are, while its loss is NaN. ``"propagate"`` decays, and
            follows the momentum, as torch does.

    Raises:
        ValueError: a hyperparameter out of range; a parameter held by another such optimizer;
            ``model`` has none of the parameters.
        TypeError: a parameter that is not a plain bf16 or fp32 tensor; a setting that is no number.
        NotImplementedError: more than one process.
    """

    rule: Rule
    # torch's settings that the rule leaves no choice in, so that none is silently ignored. Those
    # that choose between torch's own implementations (foreach, fused, capturable) mean nothing.
    fixed: dict[str, Any] = {}

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
        update: str = "backward",
        max_grad_norm: float | None = None,
        on_nonfinite: str = "propagate",
    ) -> None:
        check_format(states, rounding)
        check_update(update, max_grad_norm, on_nonfinite)
        check_name(path)
        check_hyper(defaults)
        check_not_distributed(model if model is not None else params)
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                raise ValueError("model=: pass the module once, as the first argument")
            model, params = params, list(params.named_parameters())
        try:
            seed = operator.index(seed)
        except TypeError:
            raise TypeError(f"seed={seed!r}: must be an integer") from None
        if not -(2**31) <= seed < 2**31:
            raise ValueError(f"seed={seed}: must fit in 32 bits")
        self.update = update
        self.max_grad_norm = max_grad_norm
        self.on_nonfinite = on_nonfinite
        self.grad_norm: Tensor | None = None
        self.states = states
        self.rounding = rounding
        self.seed = seed
        self.fixed = {"maximize": False, "differentiable": False, **self.fixed}
        self._slots: list[Slot] = []
        self._salt = 0
        self._members: list[tuple[dict, list[Tensor]]] = []  # groups and their parameters
        self._seen: list[Any] = []  # what the states and counts were when last looked at
        self._strides: list[tuple[int, ...]] = []
        self._clocks: list[Clock] = []
        self._names = {id(p): n for n, p in model.named_parameters()} if model is not None else {}
        self._layers: list[nn.Module] = []
        # Layers are given back also when the optimizer just goes out of use.
        self._unfuse = weakref.finalize(self, unfuse, self._layers)
        self._unfuse.atexit = False
        self._state: defaultdict[Tensor, Any] = defaultdict(dict)
        stochastic = rounding == "stochastic"
        self._queue = UpdateQueue(self.rule, states, stochastic, path, self._state)
        self._queue.deferred = update == "step"
        super().__init__(params, defaults)
        self.state = self._state
        try:
            if model is not None and self._names.keys().isdisjoint(
                id(slot.param) for slot in self._slots
            ):
                raise ValueError("model= has none of the parameters: pass the module they are from")
            if model is not None:
                self._layers += [*fuse_linears(model), *fuse_embeddings(model)]
            linears = [layer for layer in self._layers if isinstance(layer, ForgeLinear)]
            if path != "auto" and not linears:
                raise ValueError(
                    f"path={path!r}: there is no fused linear layer that it could apply to; pass "
                    "the model, or leave path='auto'"
                )
            for layer in linears:
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
        super().add_param_group(named_like(self.param_groups, param_group, self._names))
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
                check_parameter(param, name)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        clocks: dict[torch.device, Clock] = {}
        for param, name in found:
            clock = clocks.get(param.device)
            if clock is None:
                clock = clocks[param.device] = Clock(self.rule, group, param.device, self.seed)
            slot = Slot(param, name, self._salt, clock, self)
            slot.deferred = self._queue.deferred
            # Every element has a number of its own, up to 2^32 of them; in 256s, so that the low
            # byte is the column of a tile. As a signed 32-bit number.
            salt = self._salt + -(-param.numel() // 256) * 256
            self._salt = (salt + 2**31) % 2**32 - 2**31
            self._slots.append(slot)
            if param.requires_grad:
                slot.attach(self._queue)
        self._clocks.extend(clocks.values())
        self._members.append((group, list(group["params"])))

    def _check_group(self, number: int, group: dict[str, Any]) -> None:
        """Refuse hyperparameters out of range and settings that the rule does not follow."""
        for key in Options.__annotations__:
            if key in group:
                raise ValueError(
                    f"param group {number}: {key}= is one setting of the whole optimizer; pass it "
                    "to the constructor, or build an optimizer for each part"
                )
        check_hyper(group)
        self._check_fixed(number, group)

    def _check_fixed(self, number: int, group: dict[str, Any]) -> None:
        for key, value in self.fixed.items():
            if group.get(key, value) != value:
                raise ValueError(
                    f"param group {number}: {key}={group[key]}, but this {type(self).__name__} "
                    f"was built for {key}={value}"
                )

    def release(self) -> None:
        """Give the parameters back: hooks are removed and fused layers are plain ones again.

        Updates that a failed backward has left in the queue are dropped.
        """
        self._queue.discard()
        for slot in self._slots:
            slot.detach()
            if slot.updated:  # without step(): what says so must not meet the next optimizer
                slot.updated, slot.param.grad = False, None
        self._unfuse()
        self._slots, self._clocks, self._seen = [], [], []

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
        if self._queue.deferred and not clip(self):
            self.zero_grad()
            return loss
        left = [slot for slot in self._slots if not slot.updated]
        for slot in left:
            grad = slot.param.grad
            if grad is not None:
                # Autograd did not call: assigned by hand, just unfrozen, or moved since.
                if not slot.attached():
                    renew(self, slot)
                self._queue.push(slot, grad)
        self._queue.flush()
        leave_behind(self, left)
        late = [clock for clock in self._clocks if clock.running and clock.outdated()]
        for clock in self._clocks:
            clock.running = False
        dropped, deferred = [], self._queue.deferred
        for slot in self._slots:
            if slot.updated:
                param = slot.param
                if param.grad is None and not deferred:
                    dropped.append(slot.name)
                slot.updated, param.grad = False, None
        if dropped:
            raise RuntimeError(
                f"the gradients of {len(dropped)} parameters ({dropped[0]!r} ...) were discarded "
                "before step(), by model.zero_grad() or grad = None, but had been applied inside "
                "backward, which cannot be undone; to discard gradients, build the optimizer with "
                "update='step'"
            )
        if late:
            raise RuntimeError(
                "a param group's hyperparameters were changed between backward() and step(): the "
                "weights had been updated with the old ones; change them before backward()"
            )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in ``torch.optim.Optimizer``: discards gradients.

        Raises:
            ValueError: ``set_to_none=False`` with ``update="backward"``: there are no gradients
                that could be filled with zeros.
            RuntimeError: gradients of this step have been applied already, and cannot be discarded.
        """
        if not set_to_none and not self._queue.deferred:
            raise ValueError(
                "set_to_none=False: gradients are not kept, so there is none to fill with zeros; "
                "use zero_grad(), or build the optimizer with update='step'"
            )
        self._queue.discard()
        applied = [slot for slot in self._slots if slot.updated]
        for slot in self._slots:
            if slot.factors:
                slot.factors = []
        for slot in applied:
            slot.param.grad = None
        super().zero_grad(set_to_none)
        if applied:
            for slot in applied:
                slot.mark_applied()
            raise RuntimeError(
                f"zero_grad() before step(): {len(applied)} parameters ({applied[0].name!r} ...) "
                "were updated inside backward already, which cannot be undone; step() ends the "
                "step. To discard gradients, build the optimizer with update='step'; to keep a "
                "network still while another one trains through it, freeze it with "
                "requires_grad_(False)"
            )

    def _check_held(self) -> None:
        if not self._slots and any(group["params"] for group in self.param_groups):
            raise RuntimeError("this optimizer was released: build a new one")

    def check_unedited(self) -> None:
        """Refuse what the hooks would not notice; follow replaced states and layouts."""
        self._check_held()
        # Once a step, for all parameters: passes over lists that run in C.
        if len(self.param_groups) != len(self._members) or not all(
            group is kept and same(group["params"], params)
            for group, (kept, params) in zip(self.param_groups, self._members, strict=True)
        ):
            raise RuntimeError(
                "param_groups was edited: use add_param_group, or release() this optimizer and "
                "build a new one (load_state_dict keeps the states)"
            )
        for number, group in enumerate(self.param_groups):
            self._check_fixed(number, group)
        self._queue.state = self.state
        members = chain.from_iterable(params for _, params in self._members)
        strides = list(map(Tensor.stride, members))
        edited = [clock for clock in self._clocks if clock.edited()]
        if edited or strides != self._strides or not same(self._stored(), self._seen):
            follow(self, edited)
            self._strides, self._seen = strides, self._stored()

    def _stored(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self.state.values())))

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim.Optimizer``, in the layout of the same rule's torch optimizer.

        With ``states="int8"``, ``<state>_code`` and ``<state>_scale`` stand for a state: a torch
        optimizer does not know them, one of this package with other ``states`` does.

        Tensors alias the live states, except ``step`` and the like: parameters share those here,
        and an optimizer that loads them would advance them once for each parameter. Every param
        group holds ``forge_format``, the version of the layout. The seed of stochastic rounding is
        an argument of the constructor and not saved.
        """
        return detached(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, or the state of the same rule's torch optimizer.

        Unlike torch's, which casts every state to the parameter's dtype, it keeps states in this
        optimizer's format, whichever they were saved in (to nearest). Everything is checked before
        anything is changed.

        Optimizers that count no steps (torch's SGD) save no ``step``: their parameters' states
        count as one step old, which is all that such a rule asks.

        Raises:
            ValueError: groups, settings or shapes do not match; the message names the parameter. A
                ``forge_format`` that this version does not know.
            KeyError: a state, or a part of the state_dict, is missing.
            RuntimeError: between ``backward()`` and ``step()``.
        """
        self._check_held()
        queued = set(map(id, self._queue.queued()))
        applied = [slot for slot in self._slots if slot.updated and id(slot) not in queued]
        if applied:
            raise RuntimeError(
                f"load_state_dict() between backward() and step(): {len(applied)} parameters "
                f"({applied[0].name!r} ...) were updated already, and their states would go back "
                "without them; call step() first, then load the model and the optimizer"
            )
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        load(self, state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler.step asks, and would go on to an assertion that explains nothing.
        if self._queue.deferred:
            return False
        raise NotImplementedError(
            "GradScaler: the weights were updated inside backward, with scaled gradients; use "
            "torch.autocast with bfloat16, which needs no scaler, or update='step'"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} is tied to its model's parameters by hooks and cannot be "
            "copied or pickled: build a new one on the copied model, then "
            "load_state_dict(old.state_dict())"
        )
