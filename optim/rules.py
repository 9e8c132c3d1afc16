"""Element-wise update rules, each written once.

A rule is two pure functions. ``scalars(step, hyper)`` gives what a step's updates need, in fp64.
``update(w, g, states, scalars)`` gives the new weight and states. torch runs them as they stand: on
fp64 tensors they are the truth that every kernel is tested against. Triton runs the same source.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import exp2, log2, sqrt

from forge.kernels.runtime import Dual


@dataclass(frozen=True)
class Rule:
    """An element-wise optimizer.

    Args:
        name: lower case.
        states: names of the per-element states, in the order that ``update`` takes them.
        hyper: names of the hyperparameters, in the order that ``scalars`` takes them; a dotted
            name such as ``betas.0`` is an element of a param group's tuple.
        scalar_count: how many scalars ``scalars`` returns.
    """

    name: str
    states: tuple[str, ...]
    hyper: tuple[str, ...]
    scalar_count: int
    scalars: Dual
    update: Dual


def _adamw_scalars(step, hyper):
    lr, beta1, beta2, eps, weight_decay = hyper
    bias1 = 1 - exp2(step * log2(beta1))
    bias2 = 1 - exp2(step * log2(beta2))
    return lr * weight_decay, lr / bias1, 1 - beta1, 1 - beta2, 1 / sqrt(bias2), eps


def _adamw_update(w, g, states, scalars):
    exp_avg, exp_avg_sq = states
    decay, step_size, rate1, rate2, inv_root_bias2, eps = scalars
    exp_avg = exp_avg + (g - exp_avg) * rate1
    exp_avg_sq = exp_avg_sq + (g * g - exp_avg_sq) * rate2
    update = step_size * exp_avg / (sqrt(exp_avg_sq) * inv_root_bias2 + eps)
    # One expression: `w * (1 - lr * wd)` in fp32 would lose most of a decay of 1e-7.
    return w - (decay * w + update), (exp_avg, exp_avg_sq)


ADAMW = Rule(
    name="adamw",
    states=("exp_avg", "exp_avg_sq"),
    hyper=("lr", "betas.0", "betas.1", "eps", "weight_decay"),
    scalar_count=6,
    scalars=Dual(_adamw_scalars),
    update=Dual(_adamw_update),
)
