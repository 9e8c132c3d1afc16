"""Update of a weight whose gradient is a sum of products and of rows, a slice of rows at a time.

    dW = dY^T X + ...,    dW[ids[t]] += E[t] + ...      a tied head, and the embedding
    w, states = rule(w, dW, states, scalars)

Shapes: w and every state [V, C]; dY [T, V] and X [T, C] of the head, ids [T] and E [T, C] of the
embedding, whose product is that of the one-hot rows of ids with E. A slice of dW, of at most
``SCRATCH_ELEMENTS``, is formed in a buffer that is used again for the next, and applied while it is
in L2. Or, where the ids are known before the rows E: all of W is updated from the products as soon
as they exist, and rows_apart.py updates the rows of the ids once more, from what they were. Sums of
rows are fp32, over equal ids in the order of tokens, and are rounded once, when they are added to
the slice: two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from forge.kernels import wgrad_auto
from forge.kernels.apply_rule import apply_rule
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
)
from forge.kernels.sort_ids import sort_ids
from forge.kernels.target import Target

TOKENS = 8  # rows of one id that a program has in flight


def is_rows(dy: Tensor) -> bool:
    """Whether ``dy`` holds ids, which stand for one-hot rows."""
    return not dy.is_floating_point()


def add_rows_reference(grad: Tensor, ids: Tensor, rows: Tensor, first: int) -> None:
    """In plain torch. Any float dtype; sums in at least fp32."""
    inside = (ids >= first) & (ids < first + grad.shape[0])
    dtype = torch.promote_types(grad.dtype, torch.float32)
    sums = torch.zeros_like(grad, dtype=dtype)
    sums.index_add_(0, ids[inside] - first, rows[inside].to(dtype))
    grad.copy_(grad + sums)


@triton.jit
def sum_rows(
    total, id, start, ids_ptr, order_ptr, rows_ptr, pitch, tokens, column, in_c,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """``total`` plus the rows of ``id``, which begin at ``start`` of the sorted ids."""
    found = BLOCK_T
    while found == BLOCK_T:
        at = start + tl.arange(0, BLOCK_T)
        same = tl.load(ids_ptr + at, at < tokens, other=-1) == id
        token = tl.load(order_ptr + at, same, other=0)
        index = token[:, None] * pitch + column[None, :]
        row = tl.load(rows_ptr + index, same[:, None] & in_c[None, :], other=0.0)
        total += tl.sum(row.to(tl.float32), axis=0)
        found = tl.sum(same.to(tl.int32), axis=0)
        start += BLOCK_T
    return total


@triton.jit(do_not_specialize=["first", "count", "tokens"])
def _add_rows_kernel(
    grad_ptr,  # [count, columns]: the rows of the gradient from `first` on
    ids_ptr,  # [tokens], ascending
    order_ptr,  # int64 [tokens]: the token each of them belongs to
    rows_ptr,  # [tokens, columns]
    pitch,  # of rows
    first,
    count,
    tokens,
    columns,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    start = tl.program_id(0)
    id = tl.load(ids_ptr + start)
    before = tl.load(ids_ptr + start - 1, start > 0, other=-1)
    # One program adds all rows of an id: that of its first token.
    if (id >= first) & (id < first + count) & (id != before):
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_c = column < columns
        total = tl.zeros((BLOCK_C,), dtype=tl.float32)
        total = sum_rows(
            total, id, start, ids_ptr, order_ptr, rows_ptr, pitch, tokens, column, in_c, BLOCK_T
        )
        grad_ptrs = grad_ptr + (id - first).to(tl.int64) * columns + column
        total += tl.load(grad_ptrs, in_c, other=0.0).to(tl.float32)
        tl.store(grad_ptrs, total.to(grad_ptr.dtype.element_ty), in_c)


class Rows:
    """The rows of an embedding's gradient, sorted by id, to be added slice by slice.

    Args:
        ids: [...] int32 or int64. Negative ones are left out.
        rows: [..., C], a float dtype, any strides.
    """

    def __init__(self, ids: Tensor, rows: Tensor) -> None:
        self.ids, self.rows = ids.reshape(-1), as_rows(rows)
        self.order: Tensor | None = None
        if runs_triton(rows):
            # Stable: equal ids stay in the order of tokens.
            self.ids, self.order = sort_ids(self.ids)

    def add_to(self, grad: Tensor, first: int = 0) -> None:
        """Add to ``grad`` [N, C], contiguous, the rows whose ids are ``first`` to ``first + N``."""
        tokens, columns = self.rows.shape
        if self.order is None:
            add_rows_reference(grad, self.ids, self.rows, first)
            return
        block = min(256, power_of_2(columns))
        if tokens == 0:
            return
        with on_device(grad):
            _add_rows_kernel[(tokens, triton.cdiv(columns, block))](
                grad,
                self.ids,
                self.order,
                self.rows,
                self.rows.stride(0),
                first,
                grad.shape[0],
                tokens,
                columns,
                BLOCK_T=TOKENS,
                BLOCK_C=block,
                num_warps=1,  # most programs leave at once,
                **early_launch(grad),
            )


def add_product(grad: Tensor, dy: Tensor, x: Tensor, beta: int = 1) -> None:
    """``grad = beta * grad + dy^T x``, rounded to the dtype of the operands at least once.

    Args:
        grad: [N, C]; with ``beta`` 0 it may hold anything.
        dy: [T, N], and ``x`` [T, C] of the same dtype.
    """
    if grad.dtype == dy.dtype:
        grad.addmm_(dy.t(), x, beta=beta)
    elif beta:
        grad.add_(torch.mm(dy.t(), x))
    else:
        grad.copy_(torch.mm(dy.t(), x))


def row_update(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    target: Target,
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
) -> None:
    """Update one weight and its states in place from ``dW = sum of dy_i^T x_i``.

    Nothing waits for the device and no shape depends on ids: the launches can be captured.

    Args:
        dys: each [..., V], a float dtype, or ids [...] int32 or int64, which stand for one-hot rows
            (negative ones for rows of zeros).
        xs: each [..., C], of the leading dimensions of its ``dy``.
        target: of a contiguous weight [V, C].
        scalars, seed, rule: as in :func:`forge.kernels.apply_rule.apply_rule`; the random bits are
            those that it draws for the whole weight.
    """
    entries, columns = target.param.shape
    if not target.param.numel():
        return
    pairs = list(zip(dys, xs, strict=True))
    products = [(as_rows(dy), as_rows(x)) for dy, x in pairs if not is_rows(dy)]
    rows = [Rows(dy, x) for dy, x in pairs if is_rows(dy)]
    # As autograd would: an fp32 part keeps its precision beside a bf16 one.
    dtype = reduce(torch.promote_types, {x.dtype for x in xs})
    # A multiple of 16 keeps wide accesses aligned.
    size = min(entries, max(16, wgrad_auto.SCRATCH_ELEMENTS // columns // 16 * 16))
    scratch = torch.empty((size, columns), dtype=dtype, device=target.param.device)
    for first in range(0, entries, size):
        part = target.rows(first, min(first + size, entries))
        grad = scratch[: part.param.shape[0]]
        for i, (dy, x) in enumerate(products):
            add_product(grad, dy[:, first : first + size], x, beta=int(i > 0))
        if not products:
            grad.zero_()
        for some in rows:
            some.add_to(grad, first)
        apply_rule([grad], [part], scalars, seed, rule)
