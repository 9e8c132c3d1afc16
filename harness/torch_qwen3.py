"""Qwen3 in plain PyTorch, as fast as PyTorch alone makes it: the model of the strongest rival.

Same weights and mathematics as Hugging Face's ``Qwen3ForCausalLM``; q, k, v are one matrix, gate
and up are one matrix, norms are ``F.rms_norm``, attention is SDPA. Nothing in a step depends on
data, so it compiles without graph breaks and captures in a CUDA graph. A ``LlamaForCausalLM`` is
the same without norms of q and k, and has its twin here too.

Shapes: B batch, S sequence, D hidden, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED_LABEL = -100


class LossOutput(NamedTuple):
    """``loss``: fp32 scalar, the mean cross-entropy of the next token."""

    loss: Tensor


def _packed(*linears: nn.Linear) -> nn.Linear:
    """One linear whose output is the outputs of ``linears``, concatenated. Copies the weights."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    packed = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    packed.weight = nn.Parameter(weight)
    return packed


def _norm(hf_norm: Any, eps: float) -> nn.RMSNorm:
    norm = nn.RMSNorm(hf_norm.weight.shape[0], eps=eps, device="meta")
    norm.weight = nn.Parameter(hf_norm.weight.detach().clone())
    return norm


def rotate(x_BHSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotary embedding: ``(a, b) -> (a cos - b sin, b cos + a sin)`` on the halves of each head."""
    a, b = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_SE + torch.cat((-b, a), dim=-1) * sin_SE


class Attention(nn.Module):
    """Causal grouped-query attention; Qwen3 normalizes queries and keys, Llama does not."""

    def __init__(self, hf_attention: Any, eps: float) -> None:
        super().__init__()
        hf = hf_attention
        self.head_dim = hf.head_dim
        rows = (hf.q_proj.out_features, hf.k_proj.out_features, hf.v_proj.out_features)
        self.heads = [count // hf.head_dim for count in rows]
        self.qkv_proj = _packed(hf.q_proj, hf.k_proj, hf.v_proj)
        self.o_proj = _packed(hf.o_proj)
        normed = hasattr(hf, "q_norm")
        self.q_norm = _norm(hf.q_norm, eps) if normed else nn.Identity()
        self.k_norm = _norm(hf.k_norm, eps) if normed else nn.Identity()

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        packed = self.qkv_proj(x_BSD).view(B, S, -1, self.head_dim)
        q_BSHE, k_BSKE, v_BSKE = packed.split(self.heads, dim=2)
        q_BHSE = rotate(self.q_norm(q_BSHE).transpose(1, 2), cos_SE, sin_SE)
        k_BKSE = rotate(self.k_norm(k_BSKE).transpose(1, 2), cos_SE, sin_SE)
        out_BHSE = F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BSKE.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o_proj(out_BHSE.transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up in one matrix."""

    def __init__(self, hf_mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = _packed(hf_mlp.gate_proj, hf_mlp.up_proj)
        self.down_proj = _packed(hf_mlp.down_proj)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x_BSD).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and a residual."""

    def __init__(self, hf_layer: Any, eps: float) -> None:
        super().__init__()
        self.input_norm = _norm(hf_layer.input_layernorm, eps)
        self.self_attn = Attention(hf_layer.self_attn, eps)
        self.post_attention_norm = _norm(hf_layer.post_attention_layernorm, eps)
        self.mlp = MLP(hf_layer.mlp)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_norm(x_BSD), cos_SE, sin_SE)
        return x_BSD + self.mlp(self.post_attention_norm(x_BSD))


class TorchQwen3(nn.Module):
    """The plain PyTorch twin of a Hugging Face Qwen3 or Llama, as :func:`from_hf` builds it."""

    inv_freq: Tensor

    def __init__(self, hf_model: Any) -> None:
        super().__init__()
        config, hf = hf_model.config, hf_model.model
        eps = config.rms_norm_eps
        self.config = config
        weight = hf.embed_tokens.weight.detach().clone()
        rows, width = weight.shape
        padding = hf.embed_tokens.padding_idx
        self.embed_tokens = nn.Embedding(rows, width, padding_idx=padding, device="meta")
        self.embed_tokens.weight = nn.Parameter(weight)
        self.layers = nn.ModuleList(Block(layer, eps) for layer in hf.layers)
        self.norm = _norm(hf.norm, eps)
        self.lm_head = _packed(hf_model.lm_head)
        if hf_model.lm_head.weight is hf.embed_tokens.weight:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("inv_freq", hf.rotary_emb.inv_freq.clone(), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> LossOutput:
        """Mean cross-entropy of predicting ``labels[:, t + 1]`` from ``input_ids[:, : t + 1]``.

        Args:
            input_ids: ``(B, S)`` int64.
            labels: ``(B, S)`` int64, -100 where there is nothing to predict.
        """
        x_BSD = self.embed_tokens(input_ids)
        positions_S = torch.arange(input_ids.shape[1], device=input_ids.device)
        angles = positions_S[:, None].float() * self.inv_freq.float()
        angles_SE = torch.cat((angles, angles), dim=-1)
        cos_SE, sin_SE = angles_SE.cos().to(x_BSD.dtype), angles_SE.sin().to(x_BSD.dtype)
        for layer in self.layers:
            x_BSD = layer(x_BSD, cos_SE, sin_SE)
        logits = self.lm_head(self.norm(x_BSD))
        next_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), next_labels.flatten(), ignore_index=IGNORED_LABEL
        )
        return LossOutput(loss)


def from_hf(hf_model: Any) -> TorchQwen3:
    """The plain PyTorch twin of ``hf_model``, with its own copy of the weights.

    Args:
        hf_model: a transformers ``Qwen3ForCausalLM`` or ``LlamaForCausalLM`` on its device and in
            its dtype.

    Raises:
        ValueError: the configuration uses something that the twin does not have.
    """
    config = hf_model.config
    if config.model_type not in ("qwen3", "llama"):  # others lack what is looked at below
        raise ValueError(
            f"kernels='torch' does not support model_type={config.model_type!r}; use kernels='hf'"
        )
    unsupported = {
        "attention_bias": config.attention_bias,
        "attention_dropout": config.attention_dropout > 0,
        "hidden_act": config.hidden_act != "silu",
        "rope_parameters": config.rope_parameters["rope_type"] != "default",
        "layer_types": "sliding_attention" in (getattr(config, "layer_types", None) or ()),
        "mlp_bias": getattr(config, "mlp_bias", False),  # Llama's only
    }
    found = [f"{name}={getattr(config, name)!r}" for name, bad in unsupported.items() if bad]
    if found:
        raise ValueError(f"kernels='torch' does not support {', '.join(found)}; use kernels='hf'")
    return TorchQwen3(hf_model).train(hf_model.training)
