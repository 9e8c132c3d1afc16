"""A second update of the rows that were looked up, of a weight whose other update came first.

    ids, order = sort(ids)                   r: places in sorted order, t: tokens
    kept[r] = w[ids[r]]                      and every state
    product[r] = sum over t of dY[t, ids[r]] X[t]

and once E is there, from what was kept, for the first of equal ids:

    dW[ids[r]] = product[r] + sum over equal ids of E[order[r]]
    w[ids[r]], states[ids[r]] = rule(kept[r], dW[ids[r]], kept states[r], scalars)

Shapes: w and every state [V, C]; dY [M, V] and X [M, C] of the head; ids [T] and E [T, C] of the
embedding. Negative ids are left out. fp32 sums in the order of tokens. dY may come a slice of V at
a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.apply_rule import apply_rule_reference, update_elements
from forge.kernels.row_update import TOKENS, sum_rows
from forge.kernels.runtime import (
    Dual,
    as_rows,
    begin,
    early_launch,
    on_device,
    power_of_2,
    runs_triton,
    tl,
    triton,
    wide_product,
)
from forge.kernels.sort_ids import count_block, counts, ranks
from forge.kernels.target import BLOCK, Target

# Rows of a program: 128 programs for 512 tokens, about one a multiprocessor.
_KEEP = dict(ROWS=4, num_warps=4)


@triton.jit
def _copy_rows(sources, targets, at, rank, mask, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``rank`` of every target become rows ``at`` of its source, all [.., columns]."""
    for start in range(0, columns, BLOCK):
        c = (start + tl.arange(0, BLOCK))[None, :]
        inside = mask[:, None] & (c < columns)
        # All loads first: behind a store each would wait for the one in front of it.
        rows = ()
        for j in tl.static_range(len(sources)):
            rows = rows + (tl.load(sources[j] + at[:, None] * columns + c, inside),)
        for j in tl.static_range(len(sources)):
            tl.store(targets[j] + rank[:, None] * columns + c, rows[j], inside)


@triton.jit(do_not_specialize=["tokens", "height"])
def _keep_rows_kernel(
    ids_ptr,  # [tokens]; ascending unless COUNT
    sorted_ptr,  # with COUNT written, as the order
    order_ptr,  # int64
    stored,  # w and every state, [V, columns]
    kept,  # [tokens, columns]
    scales,  # of 8-bit states [V, across]; else empty
    kept_scales,
    dy_ptr,  # [height, last - first]
    dy_t_ptr,  # [tokens, height]: of each sorted id the column of dy
    dy_pitch,
    height,
    first,  # ids from here to last - 1 are kept now
    last,
    tokens,
    columns,
    across,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = i < tokens
    id = tl.load(ids_ptr + i, mask, other=0)
    rank = i
    if COUNT:
        rank = ranks(ids_ptr, id, i, tokens, BLOCK_T)
        tl.store(sorted_ptr + rank, id, mask)
        tl.store(order_ptr + rank, i.to(tl.int64), mask)
    rank = rank.to(tl.int64)
    # What stands for a negative id is read by nobody, but multiplied.
    at = tl.maximum(id, 0).to(tl.int64)
    mask = mask & (at >= first) & (at < last)
    # Numbers far apart: twice as many at a time as ids are compared with.
    for start in range(0, height, 2 * BLOCK_T):
        t = (start + tl.arange(0, 2 * BLOCK_T))[None, :]
        inside = mask[:, None] & (t < height)
        dy = tl.load(dy_ptr + t.to(tl.int64) * dy_pitch + (at - first)[:, None], inside)
        tl.store(dy_t_ptr + rank[:, None] * height + t, dy, inside)
    _copy_rows(stored, kept, at, rank, mask, columns, ROWS, BLOCK_C)
    if len(scales) > 0:
        _copy_rows(scales, kept_scales, at, rank, mask, across, ROWS, BLOCK_S)


@triton.jit(do_not_specialize=["tokens", "salt"])
def _update_rows_kernel(
    w_ptr,  # [V, columns], as every state
    state_ptrs,
    scale_ptrs,  # of 8-bit states; else empty
    old_w_ptr,  # [tokens, columns]: the rows of the sorted ids before the update of the whole
    old_state_ptrs,
    old_scale_ptrs,
    product_ptr,  # fp32 [tokens, columns]: the other part of these rows' gradients
    ids_ptr,  # [tokens], ascending
    order_ptr,  # int64 [tokens]: the token each of them belongs to
    rows_ptr,  # [tokens, columns]
    pitch,  # of rows
    scalars_ptr,
    seed_ptr,
    salt,
    tokens,
    columns,
    RULE: tl.constexpr,
    SCALARS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    start = tl.program_id(0)
    id = tl.load(ids_ptr + start)
    before = tl.load(ids_ptr + start - 1, start > 0, other=-1)
    if (id >= 0) & (id != before):
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_c = column < columns
        old = start.to(tl.int64) * columns + column[None, :]
        mask = in_c[None, :]
        total = tl.load(product_ptr + start.to(tl.int64) * columns + column, in_c, other=0.0)
        total = sum_rows(
            total, id, start, ids_ptr, order_ptr, rows_ptr, pitch, tokens, column, in_c, BLOCK_T
        )
        # Put back what is read again at once; a scale by one thread, and read by all.
        index = id.to(tl.int64) * columns + column[None, :]
        across = tl.cdiv(columns, BLOCK_C)
        blocks = tl.full((1, 1), 0, tl.int64) + id.to(tl.int64) * across + tl.program_id(1)
        old_blocks = blocks + (start - id).to(tl.int64) * across
        in_blocks = blocks >= 0
        tl.store(w_ptr + index, tl.load(old_w_ptr + old, mask, other=0.0), mask)
        for j in tl.static_range(len(state_ptrs)):
            tl.store(state_ptrs[j] + index, tl.load(old_state_ptrs[j] + old, mask, other=0), mask)
        for j in tl.static_range(len(scale_ptrs)):
            tl.store(scale_ptrs[j] + blocks, tl.load(old_scale_ptrs[j] + old_blocks))
        tl.debug_barrier()
        update_elements(
            w_ptr, state_ptrs, scale_ptrs, scalars_ptr, seed_ptr, salt, total[None, :], index,
            mask, blocks, in_blocks, RULE, SCALARS, STOCHASTIC,
        )  # fmt: skip


class RowsApart:
    """The rows of an embedding's ids, kept while the rest of the weight is updated without them.

    On one stream: build it, call :meth:`keep` before each part of that update, then :meth:`update`.

    Args:
        ids: [T], in any shape, int32 or int64: what the embedding looked up; negative ones are left
            out.
        target: of a contiguous weight [V, C].
    """

    def __init__(self, ids: Tensor, target: Target) -> None:
        self.target = target
        ids = ids.reshape(-1)
        tokens = ids.numel()
        self._unsorted: Tensor | None = None
        if counts(ids):  # by the kernel that keeps rows
            self._unsorted = ids.contiguous()
            self.ids = torch.empty_like(self._unsorted)
            self.order = torch.empty_like(self.ids, dtype=torch.int64)
        else:
            # Stable: equal ids stay in the order of tokens.
            self.ids, self.order = torch.sort(ids, stable=True)
        self.param = target.param.new_empty((tokens, target.param.shape[1]))
        self.states = tuple(s.new_empty((tokens, s.shape[1])) for s in target.states)
        self.scales = tuple(s.new_empty((tokens, s.shape[1])) for s in target.scales)
        self._dy_t: Tensor | None = None
        self.product: Tensor | None = None

    def keep(self, x: Tensor, dy: Tensor, first: int = 0) -> None:
        """Keep what the update of rows ``first`` to ``first + N`` is about to change.

        Args:
            x: [M, C], and ``dy`` [M, N]: factors of the rest of these rows' gradient, a product, of
                as many tokens as reach the head.
            first: where 0 comes, all rows have been kept: slices come from the last row down.
        """
        x, dy, target, tokens = as_rows(x), as_rows(dy), self.target, self.ids.numel()
        if self._dy_t is None:
            self._dy_t = dy.new_empty((tokens, dy.shape[0]))
        if not runs_triton(target.param):
            self._keep_reference(dy, first)
        elif tokens:
            across = target.scales[0].shape[1] if target.scales else 0
            with on_device(dy):
                _keep_rows_kernel[(-(-tokens // _KEEP["ROWS"]),)](
                    self.ids if self._unsorted is None else self._unsorted,
                    self.ids,
                    self.order,
                    (target.param, *target.states),
                    (self.param, *self.states),
                    target.scales,
                    self.scales,
                    dy,
                    self._dy_t,
                    dy.stride(0),
                    dy.shape[0],
                    first,
                    first + dy.shape[1],
                    tokens,
                    target.param.shape[1],
                    across,
                    COUNT=self._unsorted is not None,
                    BLOCK_T=count_block(tokens),
                    BLOCK_C=min(1024, power_of_2(target.param.shape[1])),
                    BLOCK_S=power_of_2(max(1, across)),
                    **_KEEP,
                    **early_launch(dy),
                )
        if first == 0:
            self.product = wide_product(self._dy_t, x)
            self._dy_t = None

    def _keep_reference(self, dy: Tensor, first: int) -> None:
        assert self._dy_t is not None
        at = self.ids.clamp(min=0)
        (here,) = ((at >= first) & (at < first + dy.shape[1])).nonzero(as_tuple=True)
        at, target = at[here], self.target
        now = (target.param, *target.states, *target.scales)
        for stored, kept in zip(now, (self.param, *self.states, *self.scales), strict=True):
            kept[here] = stored[at]
        self._dy_t[here] = dy[:, at - first].t()

    def update(self, rows: Tensor, scalars: Tensor, seed: Tensor | None, rule: Dual) -> None:
        """Update these rows from what they were, by the product and ``rows`` [..., C], of ids."""
        rows, target = as_rows(rows), self.target
        tokens, columns = rows.shape
        if not tokens or not columns:
            return
        if not runs_triton(target.param):
            self._update_reference(rows, scalars, seed, rule)
            return
        block = BLOCK if target.scales else min(256, power_of_2(columns))
        with on_device(rows):
            _update_rows_kernel[(tokens, triton.cdiv(columns, block))](
                target.param,
                target.states,
                target.scales,
                self.param,
                self.states,
                self.scales,
                self.product,
                self.ids,
                self.order,
                rows,
                rows.stride(0),
                scalars,
                seed if seed is not None else scalars,
                target.salt,
                tokens,
                columns,
                RULE=rule.triton,
                SCALARS=scalars.numel(),
                STOCHASTIC=seed is not None,
                BLOCK_T=TOKENS,
                BLOCK_C=block,
                num_warps=1,
                **early_launch(rows),
            )

    def _update_reference(
        self, rows: Tensor, scalars: Tensor, seed: Tensor | None, rule: Dual
    ) -> None:
        assert self.product is not None
        ids = self.ids.tolist()
        for id in sorted({id for id in ids if id >= 0}):
            first, count = ids.index(id), ids.count(id)
            grad = self.product[first] + rows[self.order[first : first + count]].float().sum(0)
            part = self.target.rows(id, id + 1)
            now = (part.param, *part.states, *part.scales)
            for stored, old in zip(now, (self.param, *self.states, *self.scales), strict=True):
                stored.copy_(old[first : first + 1])
            apply_rule_reference(grad[None], part, scalars, seed, rule)
