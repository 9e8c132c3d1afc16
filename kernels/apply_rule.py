"""Element-wise optimizer update with gradients that exist, many parameters in one launch.

    w, states = rule(w, g, states, scalars)          fp32 arithmetic, one rounding a stored value

Shapes: a parameter, its gradient and its states have one shape and one dense memory layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.kernels.rounding import hash32, hash32_reference, round_reference, round_to
from forge.kernels.runtime import Dual, on_device, runs_triton, tl, triton
from forge.kernels.table import (
    CAPACITY,
    alignment,
    chunks,
    field,
    find_entry,
    offset,
    pointer,
    pointer_table,
)

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
    """The update of one parameter in plain torch. Draws the same random bits as the kernel."""
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


@triton.jit
def _apply_rule_kernel(
    table_ptr,  # fields: salt, numel, offsets of w, g and the states from the next arguments
    w_ptr,
    g_ptr,
    state_ptrs,
    scalars_ptr,
    seed_ptr,
    RULE: tl.constexpr,
    SCALARS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    entry, block = find_entry(table_ptr, CAPACITY)
    salt = field(table_ptr, entry, 1, 1, CAPACITY)
    numel = field(table_ptr, entry, 2, ALIGN, CAPACITY)
    w_ptr = pointer(w_ptr, table_ptr, entry, 3, ALIGN, CAPACITY)
    g_ptr = pointer(g_ptr, table_ptr, entry, 4, ALIGN, CAPACITY)
    states = ()
    for j in tl.static_range(len(state_ptrs)):
        states = states + (pointer(state_ptrs[j], table_ptr, entry, 5 + j, ALIGN, CAPACITY),)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    g = tl.load(g_ptr + index, mask=mask, other=0.0).to(tl.float32)
    update_elements(
        w_ptr, states, scalars_ptr, seed_ptr, salt, g, index, mask, RULE, SCALARS, STOCHASTIC
    )


def apply_rule(
    grads: Sequence[Tensor],
    params: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    salts: Sequence[int],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
) -> None:
    """Update every parameter and its states in place from its gradient.

    Args:
        grads: each the shape of its parameter, one float dtype for all, any strides.
        params: bf16 or fp32, one dtype and device for all, any shapes, dense (the elements of one
            fill a contiguous range of memory).
        states: for each parameter its states, of its shape and strides; one dtype for all.
        salts: a number of each parameter's own, so that parameters draw different random bits.
        scalars: fp32 [S] on the device, in the order that ``rule`` reads.
        seed: int32 [] on the device for stochastic rounding of what is stored in bf16;
            None rounds to nearest.
        rule: ``(w, g, states, scalars) -> (w, states)``.
    """
    if not runs_triton(params[0]):
        for param, grad, state, salt in zip(params, grads, states, salts, strict=True):
            apply_rule_reference(param, grad, state, scalars, seed, salt, rule)
        return
    grads = [
        g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]
    base = [params[0], grads[0], *states[0]]
    rows = [
        (
            triton.cdiv(p.numel(), _BLOCK),
            salt,
            p.numel(),
            *map(offset, (p, g, *state), base),
        )
        for p, g, state, salt in zip(params, grads, states, salts, strict=True)
        if p.numel() > 0
    ]
    for chunk in chunks(rows):
        table, programs = pointer_table(chunk, params[0].device)
        with on_device(params[0]):
            _apply_rule_kernel[(programs,)](
                table,
                base[0],
                base[1],
                tuple(base[2:]),
                scalars,
                seed if seed is not None else scalars,
                RULE=rule.triton,
                SCALARS=scalars.numel(),
                STOCHASTIC=seed is not None,
                ALIGN=alignment(chunk, fields=slice(2, None)),
                BLOCK=_BLOCK,
                CAPACITY=CAPACITY,
                num_warps=4,
            )
