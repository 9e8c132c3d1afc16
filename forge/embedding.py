"""How an Embedding hands the gradient of its weight to the optimizer without forming it.

:class:`ForgeEmbedding` is ``nn.Embedding`` by class swap. The gradient of its weight is nonzero in
the rows of the ids alone; its backward passes the ids and the rows to the weight's
:class:`~forge.linear.Slot`, beside the factors of a tied head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.linear import FusedLayer, Slot, active_slot, slot_of


class EmbeddingFunction(torch.autograd.Function):
    """``W[ids]`` whose backward gives ``ids`` and ``dy`` to the weight's slot, not ``dW``."""

    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor, padding_idx: int | None, slot: Slot) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.slot, ctx.padding_idx, ctx.entries = slot, padding_idx, weight.shape[0]
        if slot.split is not None:
            slot.split.look_up(_kept(ids, padding_idx))
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (ids,) = ctx.saved_tensors
        padding_idx = ctx.padding_idx
        if not torch.is_grad_enabled() and not ctx.slot.deferred:
            if ctx.slot.collect(dy, _kept(ids, padding_idx)):
                return None, None, None, None
        padding = -1 if padding_idx is None else padding_idx
        dw = torch.ops.aten.embedding_dense_backward(dy, ids, ctx.entries, padding, False)
        return None, dw, None, None


def _kept(ids: Tensor, padding_idx: int | None) -> Tensor:
    """The padding entry gets no gradient; negative ids are skipped."""
    return ids if padding_idx is None else ids.masked_fill(ids == padding_idx, -1)


class ForgeEmbedding(FusedLayer, nn.Embedding):
    """An ``nn.Embedding`` whose weight gradient goes to the optimizer that holds its weight.

    A plain ``nn.Embedding`` where :class:`~forge.linear.ForgeLinear` is a plain ``nn.Linear``.
    """

    plain = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return self.traced(input)
        weight = self._parameters.get("weight")
        slot = active_slot(weight, input)
        if slot is None or not _is_plain(self):
            return super().forward(input)
        return EmbeddingFunction.apply(input, weight, self.padding_idx, slot)


def _is_plain(layer: nn.Embedding) -> bool:
    """Whether the layer only looks up, and its gradient is the plain, dense sum of rows."""
    return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse


def fuse_embeddings(model: nn.Module) -> list[nn.Module]:
    """Turn ``nn.Embedding`` layers of ``model`` into :class:`ForgeEmbedding`, in place.

    Returns the layers that were turned.

    Left as they are: subclasses, layers with ``max_norm``, ``scale_grad_by_freq`` or ``sparse``,
    and those whose weight has no slot or is not contiguous.
    """
    fused: list[nn.Module] = []
    module: Any
    for module in model.modules():
        if type(module) not in (nn.Embedding, ForgeEmbedding):
            continue
        slot = slot_of(module.weight)
        if slot is not None and module.weight.is_contiguous() and _is_plain(module):
            slot.embeds = True
            module.__class__ = ForgeEmbedding
            fused.append(module)
    return fused
