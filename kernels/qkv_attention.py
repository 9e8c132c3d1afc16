"""From a packed projection to attention's output: norm and rotation of q and k, then attention.

    q, k, v = qkv_norm_rope(qkv, ...),    out = attention(q, k, v)

Formulas and shapes are those of qk_norm_rope.py and attention.py, whose kernels run. Together they
take one kernel less than one behind the other: where attention's backward pass leaves the gradients
of k and v in parts, the rotation's adds them up as it reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge.kernels.attention import attention, attention_forward, check_attention
from forge.kernels.attention_backward import attention_backward
from forge.kernels.column_sum import Collect
from forge.kernels.qk_norm_rope import (
    check_packed,
    norm_weights_backward,
    qk_norm_rope_forward,
    qkv_norm_rope,
)
from forge.kernels.qk_norm_rope_backward import qk_norm_rope_backward
from forge.kernels.runtime import runs_triton

# Of more tokens rotated queries and keys are not kept for backward, which makes them again: a fifth
# of what a layer of Qwen3 keeps, for less than a hundredth of its time.
KEPT_TOKENS = 1024


class QKVAttentionFunction(torch.autograd.Function):
    """Causal attention of a packed qkv."""

    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, cos, sin, eps: float, scale: float, sizes, collect):
        q, k = _rotated(qkv, sizes, q_weight, k_weight, cos, sin, eps)
        out, lse = attention_forward(q, k, _values(qkv, sizes, q), scale)
        kept = (q, k) if qkv.shape[:2].numel() <= KEPT_TOKENS else ()
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin, out, lse, *kept)
        ctx.eps, ctx.scale, ctx.sizes, ctx.collect = eps, scale, sizes, collect
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        qkv, q_weight, k_weight, cos, sin, out, lse, *rotated = ctx.saved_tensors
        sizes = ctx.sizes
        q, k = rotated or _rotated(qkv, sizes, q_weight, k_weight, cos, sin, ctx.eps)
        grads = attention_backward(
            dout, q, k, _values(qkv, sizes, q), out, lse, ctx.scale, whole=False
        )
        dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        inputs, outputs = qkv.split(sizes, dim=-1), dqkv.split(sizes, dim=-1)
        sums, first = qk_norm_rope_backward(
            grads, (inputs[0], inputs[1]), tuple(outputs), q_weight, k_weight, cos, sin, ctx.eps
        )
        dws = norm_weights_backward(
            sums, first, (q_weight, k_weight), ctx.needs_input_grad[1:3], ctx.collect
        )
        return dqkv, *dws, None, None, None, None, None, None


def _rotated(qkv, sizes: list[int], *arguments) -> tuple[Tensor, Tensor]:
    q, k, _ = qkv.split(sizes, dim=-1)
    return qk_norm_rope_forward(q, k, *arguments)


def _values(qkv: Tensor, sizes: list[int], q: Tensor) -> Tensor:
    """[B, K, T, D], a view."""
    return qkv.split(sizes, dim=-1)[2].unflatten(-1, (-1, q.shape[-1])).transpose(1, 2)


def qkv_attention(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    eps: float = 1e-6,
    scale: float | None = None,
    *,
    collect: tuple[Collect | None, Collect | None] = (None, None),
) -> Tensor:
    """Causal attention of normalised and rotated queries and keys, from a packed projection.

    Args:
        qkv: [B, T, (H+2K)*D]: queries, keys, values; bf16, fp16 or fp32; D is 16, 32, 64 or 128.
        q_weight, k_weight: [D], the norms' weights, of the dtype of ``qkv``.
        cos, sin: [1 or B, T, D], of each token's position; no gradient.
        q_heads: H, a multiple of K.
        eps: of the norms.
        scale: of the scores, above 0; ``D ** -0.5`` by default.
        collect: as in :func:`forge.kernels.qk_norm_rope.qk_norm_rope`.

    Returns:
        [B, H, T, D] in the dtype of ``qkv``, whose memory is [B, T, H, D].

    Raises:
        ValueError: a shape, dtype or scale does not fit; the message names the argument.
    """
    size = q_weight.shape[0]
    scale = size**-0.5 if scale is None else scale
    sizes = check_packed(qkv, q_weight, k_weight, cos, sin, q_heads)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.dtype != qkv.dtype:
            raise ValueError(f"{name}: {weight.dtype} must be {qkv.dtype}, as qkv")
    if not runs_triton(qkv):
        heads = qkv_norm_rope(qkv, q_weight, k_weight, cos, sin, q_heads, eps)
        return attention(*heads, scale)
    q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in qkv.split(sizes, dim=-1))
    check_attention(q, k, v, scale)
    return QKVAttentionFunction.apply(qkv, q_weight, k_weight, cos, sin, eps, scale, sizes, collect)
