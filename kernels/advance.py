"""Advance an optimizer's clock: ``step += 1`` and the scalars that its rule reads at that step.

    scalars[j] = rule.scalars(step, hyper)[j]        fp64 arithmetic, stored fp32; j < S
    hyper[H - C + j] = rule.scalars(step, hyper)[S + j]    j < C, what the rule carries on
    seed       = hash32(step, base_seed)

All of it lives on the device: a learning-rate schedule never recompiles a kernel and a captured
CUDA graph advances by itself. fp64 because ``1 - beta^t`` cancels: fp32 is off by 1e-5 at t=1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.rounding import hash32, hash32_reference
from forge.kernels.runtime import (
    Dual,
    begin,
    early_launch,
    on_device,
    runs_triton,
    tl,
    triton,
)


def advance_reference(
    step: Tensor, hyper: Tensor, scalars: Tensor, seed: Tensor, base_seed: Tensor, rule: Dual
) -> None:
    step += 1
    values = rule.torch(step.double(), tuple(hyper.unbind()))
    count = scalars.numel()
    scalars.copy_(torch.stack(values[:count]))
    if carried := values[count:]:
        hyper[-len(carried) :] = torch.stack(carried)
    seed.copy_(hash32_reference(step.int(), base_seed))


@triton.jit
def _advance_kernel(
    step_ptr,  # fp32 []
    hyper_ptr,  # fp64 [HYPER]
    scalars_ptr,  # fp32 [SCALARS]
    seed_ptr,  # int32 []
    base_seed_ptr,  # int32 []
    RULE: tl.constexpr,
    HYPER: tl.constexpr,
    SCALARS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    step = tl.load(step_ptr) + 1
    tl.store(step_ptr, step)
    hyper = ()
    for j in tl.static_range(HYPER):
        hyper = hyper + (tl.load(hyper_ptr + j),)
    values = RULE(step.to(tl.float64), hyper)
    for j in tl.static_range(SCALARS):
        tl.store(scalars_ptr + j, values[j].to(tl.float32))
    carried: tl.constexpr = len(values) - SCALARS
    for j in tl.static_range(carried):
        tl.store(hyper_ptr + HYPER - carried + j, values[SCALARS + j])
    seed = hash32(step.to(tl.int32), tl.load(base_seed_ptr))
    tl.store(seed_ptr, seed.to(tl.int32, bitcast=True))


def advance(
    step: Tensor, hyper: Tensor, scalars: Tensor, seed: Tensor, base_seed: Tensor, rule: Dual
) -> None:
    """Advance ``step`` in place and refresh ``scalars`` and ``seed``.

    Args:
        step: fp32 [], the number of steps taken so far.
        hyper: fp64 [H], the group's hyperparameters in the rule's order, and behind them the C
            values that the rule carries from step to step, written.
        scalars: fp32 [S], written.
        seed: int32 [], written: the seed of this step's stochastic rounding.
        base_seed: int32 [].
        rule: ``(step, hyper) -> S + C values``.
    """
    if not runs_triton(step):
        advance_reference(step, hyper, scalars, seed, base_seed, rule)
        return
    with on_device(step):
        _advance_kernel[(1,)](
            step,
            hyper,
            scalars,
            seed,
            base_seed,
            RULE=rule.triton,
            HYPER=hyper.numel(),
            SCALARS=scalars.numel(),
            num_warps=1,
            **early_launch(step),
        )
