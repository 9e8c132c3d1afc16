"""The step count that a set of parameters shares, and the scalars their rule reads, on the device.

torch counts steps per parameter: one that gets no gradient does not advance. Parameters that always
advance together share a :class:`Clock`; one that falls behind gets a clock of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forge.kernels.advance import advance
from forge.optim.rules import Rule


def hyper_value(group: dict[str, Any], name: str) -> float | Tensor:
    """A hyperparameter of ``group`` by its rule name: ``lr``, or ``betas.0`` for ``betas[0]``."""
    key, _, index = name.partition(".")
    return group[key][int(index)] if index else group[key]


class Clock:
    """Device-side step count, hyperparameters, scalars and rounding seed of one set of parameters.

    Args:
        rule: whose ``scalars`` function is evaluated.
        group: the param group, read again at every step, so that schedulers are honoured.
        device: where the parameters live.
        seed: base seed of stochastic rounding.
        step: steps taken so far.
        carried: values of ``rule.carried`` at that step; by default those of step 0.
    """

    def __init__(
        self,
        rule: Rule,
        group: dict[str, Any],
        device: torch.device,
        seed: int,
        step: float = 0.0,
        carried: Sequence[float] = (),
    ) -> None:
        self.rule = rule
        self.group = group
        self.base = seed
        self.running = False
        # fp32 like torch's own `step`; it counts exactly to 2^24.
        self.step = torch.tensor(step, dtype=torch.float32, device=device)
        self.scalars = torch.zeros(rule.scalar_count, dtype=torch.float32, device=device)
        self.seed = torch.zeros((), dtype=torch.int32, device=device)
        self._base_seed = torch.tensor(seed, dtype=torch.int32, device=device)
        values = [0.0] * len(rule.hyper) + list(carried or [1.0] * len(rule.carried))
        self._hyper = torch.tensor(values, dtype=torch.float64, device=device)
        self._carried = self._hyper[len(rule.hyper) :]
        self._before = self._carried.clone()
        self._counts = {"step": self.step, **dict(zip(rule.carried, self._carried, strict=True))}
        self._uploaded: tuple[float, ...] | None = None
        self._origin: Clock | None = None
        self.forgotten: list[int] = []  # states of which nothing stays in this step
        self.refresh()
        self._seal()

    def counts(self) -> dict[str, Tensor]:
        """What a parameter's state shares with this clock, live: ``step``, and what it carries."""
        return self._counts

    def shown_in(self, state: dict[str, Any]) -> bool:
        """Whether a parameter's state shows this clock's counts, not some that were put there."""
        if state.get("step") is not self.step:
            return False
        return not self.rule.carried or all(state.get(k) is v for k, v in self._counts.items())

    def edited(self) -> bool:
        """Whether somebody else has written to the counts, as far as autograd's versions tell."""
        return self.step._version + self._hyper._version != self._version

    def _seal(self) -> None:
        self._version = self.step._version + self._hyper._version

    def begin(self) -> None:
        """Start the next step: ``step += 1``, scalars and seed follow."""
        # A captured copy of a device tensor would read that very tensor in every replay, also when
        # another one has taken its place: whoever replays refreshes before.
        if not (self.step.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.refresh()
        if self.rule.carried:
            self._before.copy_(self._carried)
        advance(self.step, self._hyper, self.scalars, self.seed, self._base_seed, self.rule.scalars)
        self._seal()
        self.running = True

    def outdated(self) -> bool:
        """Whether the group's numbers differ from those that this step runs with.

        Tensors on a device are not compared: that would synchronise.
        """
        return self._numbers()[0] != self._uploaded

    def _numbers(self) -> tuple[tuple[float, ...], dict[int, Tensor]]:
        """The group's hyperparameters: numbers (0 for tensors on a device), and those tensors."""
        values = [hyper_value(self.group, name) for name in self.rule.hyper]
        tensors = {
            i: v for i, v in enumerate(values) if isinstance(v, Tensor) and v.device.type != "cpu"
        }
        return tuple(0.0 if i in tensors else float(v) for i, v in enumerate(values)), tensors

    def refresh(self) -> None:
        """Bring the group's hyperparameters to the device, without synchronising.

        A device tensor (a learning rate under a captured graph) is copied on the device.
        """
        numbers, on_device = self._numbers()
        if numbers != self._uploaded:
            # A fresh pinned buffer each time: a reused one could still be in flight.
            pinned = torch.tensor(
                numbers, dtype=torch.float64, device="cpu", pin_memory=self._hyper.is_cuda
            )
            self._hyper[: len(numbers)].copy_(pinned, non_blocking=True)
            self._uploaded = numbers
            kept = [self.rule.hyper.index(name) for name in self.rule.kept]
            # A number on a device is not looked at: that would synchronise.
            self.forgotten = [
                state for state, i in enumerate(kept) if numbers[i] == 0 and i not in on_device
            ]
        for i, value in on_device.items():
            self._hyper[i].copy_(value)
        self._seal()

    def on(self, device: torch.device) -> Clock:
        """This clock for parameters that were moved to ``device``."""
        carried = self._carried.tolist()
        clock = Clock(self.rule, self.group, device, self.base, float(self.step), carried)
        clock._origin = self
        return clock

    def follows(self, other: Clock, device: torch.device) -> bool:
        """Whether this is ``other.on(device)``, made before."""
        return self._origin is other and self.step.device == device

    def behind(self) -> Clock:
        """A new clock one step behind this one, for parameters that this step left out."""
        clock = Clock(self.rule, self.group, self.step.device, self.base)
        clock.step.copy_(self.step - 1)
        clock._carried.copy_(self._before)
        clock._seal()
        return clock
