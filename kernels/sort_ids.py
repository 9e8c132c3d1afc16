"""Ids sorted by counting: how many are smaller, or equal and earlier, is an id's place.

    rank[i] = sum over j of (ids[j] < ids[i]) + (ids[j] = ids[i] and j < i)
    sorted[rank[i]] = ids[i],    order[rank[i]] = i

Shapes: ids, sorted, order [T]. T^2 comparisons, spread over all multiprocessors, in one kernel; a
radix sort of 512 ids runs on one of them and needs ten kernels around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.kernels.runtime import (
    begin,
    early_launch,
    on_device,
    power_of_2,
    runs_triton,
    tl,
    triton,
)

# Up to so many are counted: 4,096 take about 10 us of comparisons and of reads from L2.
COUNTED = 4096
_TILE = dict(ROWS=8, num_warps=4)


@triton.jit
def ranks(ids_ptr, id, i, count, BLOCK: tl.constexpr):
    """int32 [ROWS]: the places of ``id``, the ids of positions ``i``, among ``count`` ids."""
    rank = tl.zeros((i.shape[0],), dtype=tl.int32)
    for start in range(0, count, BLOCK):
        j = (start + tl.arange(0, BLOCK))[None, :]
        other = tl.load(ids_ptr + j, j < count, other=0)
        equal_before = (other == id[:, None]) & (j < i[:, None])
        before = (j < count) & ((other < id[:, None]) | equal_before)
        rank += tl.sum(before.to(tl.int32), axis=1)
    return rank


@triton.jit(do_not_specialize=["count"])
def _sort_ids_kernel(
    ids_ptr,
    sorted_ptr,
    order_ptr,  # int64
    count,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    id = tl.load(ids_ptr + i, i < count, other=0)
    rank = ranks(ids_ptr, id, i, count, BLOCK)
    tl.store(sorted_ptr + rank, id, i < count)
    tl.store(order_ptr + rank, i.to(tl.int64), i < count)


def counts(ids: Tensor) -> bool:
    """Whether ``ids`` are few enough, and where a kernel can count."""
    return runs_triton(ids) and ids.numel() <= COUNTED


def count_block(count: int) -> int:
    """Ids that are compared with at a time."""
    return min(256, power_of_2(max(16, count)))


def sort_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """As ``torch.sort(ids, stable=True)``: the sorted ids, and int64 the place of each before.

    Args:
        ids: [T] int32 or int64.
    """
    if not counts(ids):
        return torch.sort(ids, stable=True)
    ids = ids.contiguous()
    found, order = torch.empty_like(ids), torch.empty_like(ids, dtype=torch.int64)
    count = ids.numel()
    if count:
        with on_device(ids):
            _sort_ids_kernel[(-(-count // _TILE["ROWS"]),)](
                ids,
                found,
                order,
                count,
                BLOCK=count_block(count),
                **_TILE,
                **early_launch(ids),
            )
    return found, order
