"""Element-wise optimizer update with gradients that exist, many parameters in one launch.

    w, states = rule(w, g, states, scalars)          fp32 arithmetic, one rounding a stored value

Shapes: a parameter, its gradient and its states have one shape and one dense memory layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.kernels.rounding import (
    random_bits,
    random_bits_reference,
    round_reference,
    round_to,
)
from forge.kernels.runtime import Dual, on_device, runs_triton, tl, triton
from forge.kernels.target import CAPACITY, Table, Target, field, find_entry, pointer

_BLOCK = 1024


def apply_rule_reference(
    grad: Tensor, target: Target, scalars: Tensor, seed: Tensor | None, rule: Dual
) -> None:
    """The update of one parameter in plain torch. Draws the same random bits as the kernel."""
    param, states = target.param, target.states
    h = None
    if seed is not None:
        # Index in memory order: it is what the kernel hashes, also for a transposed parameter.
        index = torch.arange(param.numel(), dtype=torch.int32, device=param.device)
        x = index.as_strided(param.shape, param.stride()) + target.salt
        h = random_bits_reference(x, seed)
    new_param, new_states = rule.torch(
        param.float(), grad.float(), tuple(s.float() for s in states), tuple(scalars.unbind())
    )
    for stored, value in zip((param, *states), (new_param, *new_states), strict=True):
        stored.copy_(round_reference(value, stored.dtype, h))


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
        h = random_bits(index + salt, tl.load(seed_ptr))
    w = round_to(w, w_ptr.dtype.element_ty, h, STOCHASTIC)
    tl.store(w_ptr + index, w, mask=mask)
    for j in tl.static_range(len(state_ptrs)):
        s = round_to(states[j], state_ptrs[j].dtype.element_ty, h, STOCHASTIC)
        tl.store(state_ptrs[j] + index, s, mask=mask)


@triton.jit
def _apply_rule_kernel(
    table_ptr,  # entries: address of g, then Target.fields
    g_ptr,  # of this and the next arguments only the types count
    w_ptr,
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
    entry_ptr = table_ptr + CAPACITY + entry * (6 + len(state_ptrs))
    g_ptr = pointer(g_ptr, entry_ptr, 0, ALIGN)
    salt = field(entry_ptr, 1, 1)
    numel = field(entry_ptr, 2, ALIGN)
    w_ptr = pointer(w_ptr, entry_ptr, 5, ALIGN)
    states = ()
    for j in tl.static_range(len(state_ptrs)):
        states = states + (pointer(state_ptrs[j], entry_ptr, 6 + j, ALIGN),)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    g = tl.load(g_ptr + index, mask=mask, other=0.0).to(tl.float32)
    update_elements(
        w_ptr, states, scalars_ptr, seed_ptr, salt, g, index, mask, RULE, SCALARS, STOCHASTIC
    )


def apply_rule(
    grads: Sequence[Tensor],
    targets: Sequence[Target],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
) -> None:
    """Update every target in place from its gradient.

    Args:
        grads: each the shape of its parameter, any strides; one float dtype for all.
        targets: of one device, and one dtype for all parameters and for all states.
        scalars: fp32 [S] on the device, in the order that ``rule`` reads.
        seed: int32 [] on the device for stochastic rounding of what is stored in bf16;
            None rounds to nearest.
        rule: ``(w, g, states, scalars) -> (w, states)``.
    """
    first = targets[0]
    if not runs_triton(first.param):
        for grad, target in zip(grads, targets, strict=True):
            apply_rule_reference(grad, target, scalars, seed, rule)
        return
    for start in range(0, len(targets), CAPACITY):
        table = Table()
        copies: list[Tensor] = []  # live until the launch
        chunk = slice(start, start + CAPACITY)
        for grad, target in zip(grads[chunk], targets[chunk], strict=True):
            if not target.fields[1]:
                continue
            if grad.stride() != target.param.stride():
                grad = torch.empty_like(target.param, dtype=grad.dtype).copy_(grad)
                copies.append(grad)
            address = grad.data_ptr()
            programs = -(-target.fields[1] // _BLOCK)
            table.add(programs, (address, *target.fields), address | target.flat_bits)
        if not table.programs:
            continue
        with on_device(first.param):
            _apply_rule_kernel[(table.programs,)](
                table.to(first.param.device),
                grads[0],
                first.param,
                first.states,
                scalars,
                seed if seed is not None else scalars,
                RULE=rule.triton,
                SCALARS=scalars.numel(),
                STOCHASTIC=seed is not None,
                ALIGN=table.alignment,
                BLOCK=_BLOCK,
                CAPACITY=CAPACITY,
                num_warps=4,
            )
