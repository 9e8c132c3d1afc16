"""Element-wise optimizer update with a gradient that exists.

    w, states = rule(w, g, states, scalars)          fp32 arithmetic, one rounding a stored value

Shapes: ``param``, ``grad`` and every state have one shape and one dense memory layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.kernels.rounding import hash32, hash32_reference, round_reference, round_to
from forge.kernels.runtime import Dual, on_device, runs_triton, tl, triton

_BLOCK = 1024


def apply_rule_reference(
    param: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    scalars: Tensor,
    seed: Tensor | None,
    salt: int,
    rule: Dual,
) -> None:
    """The update in plain torch. Draws the same random bits as the kernel."""
    h = None
    if seed is not None:
        # Index in memory order: it is what the kernel hashes, also for a transposed parameter.
        index = torch.arange(param.numel(), device=param.device).as_strided(
            param.shape, param.stride()
        )
        h = hash32_reference((index + salt) & 0xFFFFFFFF, seed.long() & 0xFFFFFFFF)
    new_param, new_states = rule.torch(
        param.float(), grad.float(), tuple(s.float() for s in states), tuple(scalars.unbind())
    )
    for stream, (stored, value) in enumerate(
        zip((param, *states), (new_param, *new_states), strict=True)
    ):
        stored.copy_(round_reference(value, stored.dtype, h, stream))


@triton.jit
def update_elements(
    w_ptr,
    state_ptrs,
    scalars_ptr,
    seed_ptr,
    salt,
    g,  # fp32, the gradient of these elements
    index,  # int64, their offsets from w_ptr and from every state pointer
    mask,
    RULE: tl.constexpr,
    SCALARS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Apply the rule to the elements at ``index``: load, update in fp32, round once, store."""
    w = tl.load(w_ptr + index, mask=mask, other=0.0).to(tl.float32)
    states = ()
    for j in tl.static_range(len(state_ptrs)):
        states = states + (tl.load(state_ptrs[j] + index, mask=mask, other=0.0).to(tl.float32),)
    scalars = ()
    for j in tl.static_range(SCALARS):
        scalars = scalars + (tl.load(scalars_ptr + j),)

    w, states = RULE(w, g, states, scalars)

    h = index
    if STOCHASTIC:
        h = hash32(index + salt, tl.load(seed_ptr))
    w = round_to(w, w_ptr.dtype.element_ty, h, 0, STOCHASTIC)
    tl.store(w_ptr + index, w, mask=mask)
    for j in tl.static_range(len(state_ptrs)):
        s = round_to(states[j], state_ptrs[j].dtype.element_ty, h, j + 1, STOCHASTIC)
        tl.store(state_ptrs[j] + index, s, mask=mask)


@triton.jit(do_not_specialize=["salt"])
def _apply_rule_kernel(
    w_ptr,
    g_ptr,
    state_ptrs,
    scalars_ptr,
    seed_ptr,
    salt,
    numel,
    RULE: tl.constexpr,
    SCALARS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    g = tl.load(g_ptr + index, mask=mask, other=0.0).to(tl.float32)
    update_elements(
        w_ptr, state_ptrs, scalars_ptr, seed_ptr, salt, g, index, mask, RULE, SCALARS, STOCHASTIC
    )


def apply_rule(
    param: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    scalars: Tensor,
    seed: Tensor | None,
    salt: int,
    rule: Dual,
) -> None:
    """Update ``param`` and ``states`` in place from ``grad``.

    Args:
        param: bf16 or fp32, any shape, dense (its elements fill a contiguous range of memory).
        grad: same shape as ``param``, any float dtype and strides.
        states: same shape and strides as ``param``, bf16 or fp32.
        scalars: fp32 [S] on the device, in the order that ``rule`` reads.
        seed: int32 [] on the device for stochastic rounding of what is stored in bf16;
            None rounds to nearest.
        salt: a number of this parameter's own, so that parameters draw different bits.
        rule: ``(w, g, states, scalars) -> (w, states)``.
    """
    if not runs_triton(param):
        apply_rule_reference(param, grad, states, scalars, seed, salt, rule)
        return
    if param.numel() == 0:
        return
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    with on_device(param):
        _apply_rule_kernel[(triton.cdiv(param.numel(), _BLOCK),)](
            param,
            grad,
            tuple(states),
            scalars,
            seed if seed is not None else scalars,
            salt,
            param.numel(),
            RULE=rule.triton,
            SCALARS=scalars.numel(),
            STOCHASTIC=seed is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )
