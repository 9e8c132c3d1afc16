"""Element-wise optimizer update with gradients that exist, many parameters in one launch.

    w, states = rule(w, g, states, scalars)          fp32 arithmetic, one rounding a stored value

Shapes: a parameter, its gradient and its states have one shape and one dense memory layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.kernels.block_code import decode, decode_reference, encode, encode_reference
from forge.kernels.rounding import (
    half_reference,
    random_bits,
    random_bits_reference,
    round_reference,
    round_to,
)
from forge.kernels.runtime import (
    Dual,
    begin,
    early_launch,
    on_device,
    runs_triton,
    tl,
    triton,
)
from forge.kernels.target import BLOCK, CAPACITY, Table, Target, field, find_entry, pointer

_ELEMENTS = 1024  # a program


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
    if target.scales:
        old = tuple(map(decode_reference, states, target.scales))
    else:
        old = tuple(s.float() for s in states)
    new_param, new_states = rule.torch(param.float(), grad.float(), old, tuple(scalars.unbind()))
    param.copy_(round_reference(new_param, param.dtype, h))
    for j, (stored, value) in enumerate(zip(states, new_states, strict=True)):
        if target.scales:
            encode_reference(
                value, stored, target.scales[j], h if h is None else half_reference(h, j)
            )
        else:
            stored.copy_(round_reference(value, stored.dtype, h))


@triton.jit
def update_elements(
    w_ptr,
    state_ptrs,
    scale_ptrs,  # of 8-bit states; else empty
    scalars_ptr,
    seed_ptr,
    salt,
    g,  # fp32, the gradient of these elements; with scales [R, 128]
    index,  # int64, their offsets from w_ptr and from every state pointer
    mask,
    blocks,  # with scales: [R, 1], the offsets of the rows' scales
    in_blocks,
    RULE: tl.constexpr,
    SCALARS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Apply the rule to the elements at ``index``: load, update in fp32, round once, store."""
    w = tl.load(w_ptr + index, mask=mask, other=0.0).to(tl.float32)
    states = ()
    for j in tl.static_range(len(state_ptrs)):
        s = tl.load(state_ptrs[j] + index, mask=mask, other=0)
        if len(scale_ptrs) > 0:
            s = decode(s, tl.load(scale_ptrs[j] + blocks, mask=in_blocks, other=0))
        states = states + (s.to(tl.float32),)
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
        if len(scale_ptrs) > 0:
            s, scale = encode(states[j], mask, h, j, state_ptrs[j].dtype.element_ty, STOCHASTIC)
            tl.store(scale_ptrs[j] + blocks, scale, mask=in_blocks)
        else:
            s = round_to(states[j], state_ptrs[j].dtype.element_ty, h, STOCHASTIC)
        tl.store(state_ptrs[j] + index, s, mask=mask)


@triton.jit
def _apply_rule_kernel(
    table_ptr,  # entries: address of g, then Target.fields
    g_ptr,  # of this and the next arguments only the types count
    w_ptr,
    state_ptrs,
    scale_ptrs,
    scalars_ptr,
    seed_ptr,
    RULE: tl.constexpr,
    SCALARS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGN: tl.constexpr,
    ELEMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    entry, program = find_entry(table_ptr, CAPACITY)
    entry_ptr = table_ptr + CAPACITY + entry * (6 + len(state_ptrs) + len(scale_ptrs))
    g_ptr = pointer(g_ptr, entry_ptr, 0, ALIGN)
    salt = field(entry_ptr, 1, 1)
    numel = field(entry_ptr, 2, ALIGN)
    w_ptr = pointer(w_ptr, entry_ptr, 5, ALIGN)
    states = ()
    for j in tl.static_range(len(state_ptrs)):
        states = states + (pointer(state_ptrs[j], entry_ptr, 6 + j, ALIGN),)
    scales = ()
    for j in tl.static_range(len(scale_ptrs)):
        scales = scales + (pointer(scale_ptrs[j], entry_ptr, 6 + len(state_ptrs) + j, 1),)
    if len(scale_ptrs) > 0:
        # Whole blocks of a row at a time: they share what is computed from all of their values.
        rows = field(entry_ptr, 3, 1)
        columns = field(entry_ptr, 4, ALIGN)
        across = tl.cdiv(columns, BLOCK).to(tl.int32)
        blocks = (program * (ELEMENTS // BLOCK) + tl.arange(0, ELEMENTS // BLOCK))[:, None]
        row = (blocks // across).to(tl.int64)
        column = (blocks % across) * BLOCK + tl.arange(0, BLOCK)[None, :]
        index = row * columns + column
        in_blocks = row < rows
        mask = in_blocks & (column < columns)
    else:
        index = program.to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        mask = index < numel
        blocks = index
        in_blocks = mask
    g = tl.load(g_ptr + index, mask=mask, other=0.0).to(tl.float32)
    update_elements(
        w_ptr, states, scales, scalars_ptr, seed_ptr, salt, g, index, mask, blocks, in_blocks,
        RULE, SCALARS, STOCHASTIC,
    )  # fmt: skip


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
        seed: int32 [] on the device for stochastic rounding of what is stored in bf16 or 8 bits;
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
            if grad.stride() != target.stride:
                grad = torch.empty_like(target.param, dtype=grad.dtype).copy_(grad)
                copies.append(grad)
            address = grad.data_ptr()
            _, numel, rows, columns = target.fields[:4]
            bits = address | target.flat_bits
            # Not triton.cdiv: 2 us a call.
            if target.scales:
                programs = -(-(rows * -(-columns // BLOCK)) // (_ELEMENTS // BLOCK))
                bits |= columns
            else:
                programs = -(-numel // _ELEMENTS)
            table.add(programs, (address, *target.fields), bits)
        if not table.programs:
            continue
        with on_device(first.param):
            _apply_rule_kernel[(table.programs,)](
                table.to(first.param.device),
                grads[0],
                first.param,
                first.states,
                first.scales,
                scalars,
                seed if seed is not None else scalars,
                RULE=rule.triton,
                SCALARS=scalars.numel(),
                STOCHASTIC=seed is not None,
                ALIGN=table.alignment,
                ELEMENTS=_ELEMENTS,
                BLOCK=BLOCK,
                CAPACITY=CAPACITY,
                num_warps=4,
                **early_launch(first.param),
            )
