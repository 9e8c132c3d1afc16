"""Products of a linear layer by what is fastest: a kernel for Hopper, or torch's.

    y = x W^T          x [..., K], W [N, K], y [..., N]
    dx = dy W          dy [..., N], W [N, K], dx [..., K]

The table of tiles, which says for which weights there is a kernel, and the rule; the kernel is in
kernels/linear_hopper.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.kernels.runtime import HAS_TRITON, capability

# False: torch's products everywhere, to compare with.
HOPPER = True

# More tokens fill the GPU more than once, which torch's products are made for.
MOST_TOKENS = 1024

TOKENS = 128  # of a tile, half of them a warpgroup's


class Tile(NamedTuple):
    """How a product is cut."""

    columns: int  # of a tile: 64 or 128
    slots: int  # 227 KB of shared memory hold 6 of 64 x (128 + 128) numbers
    parts: int = 1  # of the sum
    terms: int = 64  # of the sum in a slot: 64 or 128


# By weight [N, K]: those of Qwen3-0.6B, as measured between two norms (results/LOG.md). Behind each
# the programs for 512 tokens, of which 132 run at once. Of the others torch's own are as fast.
FORWARD: dict[tuple[int, ...], Tile] = {
    (4096, 1024): Tile(128, 5),  # q, k, v: 128
    (1024, 2048): Tile(128, 6, parts=4),  # o: 128
    (1024, 3072): Tile(128, 6, parts=4),  # down: 128
}
BACKWARD: dict[tuple[int, ...], Tile] = {
    (6144, 1024): Tile(128, 5, parts=4),  # gate, up: 128
    (1024, 2048): Tile(64, 4, terms=128),  # o: 128
    (4096, 1024): Tile(128, 5, parts=4),  # q, k, v: 128
}
OTHER = Tile(128, 6)


def tile_for(a: Tensor, weight: Tensor, tiles: dict[tuple[int, ...], Tile]) -> Tile | None:
    """The tile with which the kernel takes this product; None: it does not, or is not faster."""
    if not HOPPER or not a.is_cuda or not HAS_TRITON:
        return None
    tile = tiles.get(weight.shape)
    if tile is None or not 0 < a.numel() <= MOST_TOKENS * a.shape[-1]:
        return None
    plain = a.dtype == weight.dtype == torch.bfloat16 and weight.is_contiguous()
    return tile if plain and capability(a.device) == (9, 0) else None


def linear_forward(
    x: Tensor, weight: Tensor, *, prefetch: bool = False, unsummed: bool = False
) -> Tensor:
    """``x W^T`` [..., N]; not differentiable.

    Args:
        x: [..., K], any float dtype.
        weight: [N, K] of the same dtype.
        prefetch: as in :func:`forge.kernels.linear_hopper.linear_hopper`.
        unsummed: the result goes to who asks for :func:`parts_of` it, and to nobody else.
    """
    tile = tile_for(x, weight, FORWARD)
    if tile is None or (tile.parts > 1 and not unsummed):
        return F.linear(x, weight)
    from forge.kernels.linear_hopper import linear_hopper

    if tile.parts > 1:
        return _carry(linear_hopper(x, weight, parts=True, prefetch=prefetch), x)
    # What a custom autograd function returns may be no view.
    return linear_hopper(x, weight, prefetch=prefetch).data


def linear_backward(
    dy: Tensor, weight: Tensor, *, prefetch: bool = False, unsummed: bool = False
) -> Tensor:
    """``dy W`` [..., K]: as :func:`linear_forward`, for ``dy`` [..., N]."""
    tile = tile_for(dy, weight, BACKWARD)
    if tile is None or (tile.parts > 1 and not unsummed):
        # Not `dy @ weight`: the operator costs twice the call.
        return torch.matmul(dy, weight)
    from forge.kernels.linear_hopper import linear_hopper_dx

    if tile.parts > 1:
        return _carry(linear_hopper_dx(dy, weight, parts=True, prefetch=prefetch), dy)
    return linear_hopper_dx(dy, weight, prefetch=prefetch).data


def _carry(parts: Tensor, like: Tensor) -> Tensor:
    """The first part in place of the sum of all [P, T, N], which it carries."""
    y = parts[0].view(*like.shape[:-1], parts.shape[2]).data
    y._forge_parts = (parts, y._version)  # type: ignore[attr-defined]
    return y


def parts_of(y: Tensor) -> Tensor | None:
    """Parts [P, T, N] whose sum ``y`` stands for; None: ``y`` is what it is.

    Raises:
        RuntimeError: ``y`` was written to, by who took it for the sum.
    """
    found = y.__dict__.get("_forge_parts")
    if found is None:
        return None
    parts, version = found
    if y._version != version:
        raise RuntimeError(
            "a layer's result was changed in place before the norm behind it had read it; "
            "forge.optimize(model, undo=True) restores layers whose results may be changed"
        )
    return parts
