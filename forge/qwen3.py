"""Hugging Face's Qwen3 with the kernels of this package: subclasses that modules are turned into.

Every class computes what its base does. It falls back to it for what the kernels do not cover, and
under ``torch.compile``, which fuses the plain operations itself. This file imports transformers
(5.13 or later): only ``forge.optimize`` loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.activations import ACT2FN
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3MLP,
    Qwen3Model,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
)

from forge.kernels import linear_auto
from forge.kernels.attention import DTYPES, HEAD_SIZES, attention
from forge.kernels.linear_cross_entropy import linear_cross_entropy
from forge.kernels.qk_norm_rope import qk_norm_rope, qkv_norm_rope
from forge.kernels.qkv_attention import qkv_attention
from forge.kernels.rms_norm import add_rms_norm, rms_norm
from forge.kernels.rope_tables import counted_rope_tables, rope_tables
from forge.kernels.runtime import runs_triton
from forge.kernels.swiglu import swiglu
from forge.linear import ForgeLinear, collector, slot_of
from forge.packed_linear import is_plain, packed_linear, plain_weight
from forge.swiglu_linear import swiglu_linear

# Logits of up to so many bytes are kept (4,096 tokens of Qwen3 in bf16: 1.2 GB). Of larger ones a
# slice of the vocabulary is kept, and the others are formed twice: up to a third more time in the
# head, a fraction of memory.
LOGITS_BYTES = 2 * 2**30
SLICE_BYTES = 512 * 2**20
# The same where a captured step updates the head from each slice at once: no gradient of the whole
# weight is formed, and slices pay earlier.
CAPTURED_LOGITS_BYTES = 896 * 2**20

# `forge.optimize(attention="auto")` takes this package's attention for so many tokens or fewer: on
# an H200 it wins up to here (results/LOG.md).
SHORT = 4096


class ForgeQwen3RMSNorm(Qwen3RMSNorm):
    """``rms_norm``, also of a sum that it forms itself."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if is_compiling():
            return super().forward(hidden_states)
        # Left by `add`; it counts only if nothing has touched the sum since.
        norm, y, state = hidden_states.__dict__.pop("_forge_normed", (None, None, None))
        if norm is self and state == _state(hidden_states):
            return y
        weight = self.weight
        return rms_norm(hidden_states, weight, self.variance_epsilon, collect=collector(weight))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``x + residual``, which carries its normalised form to the call of this norm."""
        weight = self.weight
        y, h = add_rms_norm(x, residual, weight, self.variance_epsilon, collect=collector(weight))
        h._forge_normed = (self, y, _state(h))  # type: ignore[attr-defined]
        return h


def _state(t: Tensor) -> tuple[Any, ...]:
    """Differs where what was computed from ``t`` before does not stand for computing it now.

    That is so after ``t`` was written to, in another grad mode, and on the other side of a
    checkpoint's edge: a recomputation must repeat the forward pass, and starts from ``t`` alone.
    """
    version = 0 if t.is_inference() else t._version
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # a checkpoint's own
    return version, t.grad_fn, torch.is_grad_enabled(), hooks


def _add(norm: nn.Module | None, x: Tensor, residual: Tensor) -> Tensor:
    """``x + residual``, with ``norm`` of it in the same kernel where that is possible."""
    if (
        isinstance(norm, ForgeQwen3RMSNorm)
        and "forward" not in norm.__dict__
        and norm.weight.device == x.device == residual.device
    ):
        return norm.add(x, residual)
    return residual + x


class ForgeQwen3RotaryEmbedding(Qwen3RotaryEmbedding):
    """Both tables, and positions that nobody gave, in one kernel."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if is_compiling() or not self._is_fixed() or self.inv_freq.device != position_ids.device:
            return super().forward(x, position_ids)
        # Left by `count`; it counts only if nothing has touched the positions since.
        made = position_ids.__dict__.pop("_forge_tables", None)
        if made is not None and made[:3] == (self, x.dtype, position_ids._version):
            return made[3:]
        return rope_tables(self.inv_freq, position_ids, x.dtype, self.attention_scaling)

    def count(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """Positions [1, T] from 0 on, which carry their tables to the call of this module."""
        scaling = self.attention_scaling
        positions, cos, sin = counted_rope_tables(self.inv_freq, tokens, dtype, scaling)
        positions._forge_tables = (self, dtype, positions._version, cos, sin)  # type: ignore[attr-defined]
        return positions

    def is_counting(self) -> bool:
        """Whether :meth:`count` stands for what the model would compute itself."""
        plain = is_plain(self, ForgeQwen3RotaryEmbedding)
        return plain and self._is_fixed() and runs_triton(self.inv_freq)

    def _is_fixed(self) -> bool:
        """Whether frequencies are the same for sequences of every length."""
        kind = str(self.rope_type)
        return "dynamic" not in kind and kind != "longrope"


class ForgeQwen3Attention(Qwen3Attention):
    """One product for q, k and v, one kernel for their norms and rotation; see ``_is_ours``."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # `cache` was `past_key_values` before transformers 5.24.
        between = kwargs.pop("between_norms", False)
        cached = kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None
        norms = is_plain(self.q_norm, ForgeQwen3RMSNorm) and is_plain(
            self.k_norm, ForgeQwen3RMSNorm
        )
        if cached or not norms or is_compiling():
            return super().forward(
                hidden_states, position_embeddings, attention_mask=attention_mask, **kwargs
            )
        kwargs.pop("cache", None)
        kwargs.pop("past_key_values", None)
        output = partial(self.o_proj, unsummed=True) if between else self.o_proj
        weights = (self.q_norm.weight, self.k_norm.weight)
        collect = (collector(weights[0]), collector(weights[1]))
        eps = self.q_norm.variance_epsilon
        cos, sin = position_embeddings
        layers = (self.q_proj, self.k_proj, self.v_proj)
        qkv = packed_linear(hidden_states, layers, alone=between)
        scores = None
        if qkv is not None:
            heads = self.q_proj.out_features // self.head_dim
            # What is decided by, of all heads.
            raw = qkv.detach().unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            if weights[0].dtype == qkv.dtype and self._is_ours(raw, raw, attention_mask, kwargs):
                out = qkv_attention(
                    qkv, *weights, cos, sin, heads, eps, self.scaling, collect=collect
                ).transpose(1, 2)
                return output(out.reshape(*hidden_states.shape[:-1], -1)), None
            q, k, v = qkv_norm_rope(qkv, *weights, cos, sin, heads, eps, collect=collect)
        else:
            q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
            q, k = qk_norm_rope(q, k, *weights, cos, sin, eps, collect=collect)
            v = self.v_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self._is_ours(q, v, attention_mask, kwargs):
            out = attention(q, k, v, self.scaling).transpose(1, 2)
        else:
            out, scores = self._attend(q, k, v, attention_mask, kwargs)
        return output(out.reshape(*hidden_states.shape[:-1], -1)), scores

    def _is_ours(self, q: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
        """Whether this package's kernels attend, for q and v [B, any heads, T, D].

        If ``attention="forge"``, or if ``"auto"`` and they are known to win: up to ``SHORT`` tokens
        in bf16 or fp16, on Hopper. If not, what the model was configured with does, which is all
        there is for a mask, dropout and other implementations.

        Raises:
            ValueError: ``attention="forge"``, and they cannot.
        """
        asked = self.__dict__.get("_attention", "auto")
        if asked != "forge" and not (asked == "auto" and _is_short(q)):
            return False
        reason = self._needs_sdpa(q, v, mask, kwargs)
        if reason is not None and asked == "forge":
            raise ValueError(f'attention="forge": {reason}; use forge.optimize(model)')
        return reason is None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Configured attention [B, T, H, D] of q [B, H, T, D], k, v; scores where they exist."""
        return self._configured()(
            self,
            q,
            k,
            v,
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )

    def _configured(self) -> Callable:
        """The attention that the model was configured with."""
        return ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )

    def _needs_sdpa(
        self, q: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> str | None:
        """Why this package's attention cannot do what was asked for; None if it can."""
        configured = self.config._attn_implementation
        if configured != "sdpa":
            # FlashAttention finds packed sequences in the positions, without a mask.
            return f"it stands in for SDPA, and the model was configured with {configured}"
        if self._configured() is not sdpa_attention_forward:
            return "it stands in for transformers' SDPA, and another one was registered as 'sdpa'"
        if kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
            return "it has neither position_bias nor softcap"
        if mask is not None:
            return "it is causal alone, and padding, packed sequences or a window need a mask"
        if not (self.is_causal and kwargs.get("is_causal", True)):
            return "it is causal, and this layer is not"
        if self.training and self.attention_dropout:
            return "it has no dropout"
        if torch.is_autocast_enabled(q.device.type):
            return "it does not cast, as autocast asks for"
        if q.dtype not in DTYPES or v.dtype != q.dtype:
            return f"queries and values are {q.dtype} and {v.dtype}"
        if q.shape[-1] not in HEAD_SIZES:
            return f"heads have a size of {q.shape[-1]}, none of {HEAD_SIZES}"
        if not runs_triton(q):
            return "it needs a CUDA GPU"
        return None


def _is_short(q: Tensor) -> bool:
    """Whether this package's attention wins, for queries [B, H, T, D]."""
    return (
        q.shape[2] <= SHORT
        and q.is_cuda
        and q.element_size() == 2
        and torch.cuda.get_device_capability(q.device) == (9, 0)
    )


_SILU = (type(ACT2FN["silu"]), nn.SiLU)


class ForgeQwen3MLP(Qwen3MLP):
    """One product for gate and up, one kernel between them and down."""

    def forward(self, x: Tensor, between_norms: bool = False) -> Tensor:
        if is_compiling() or not is_plain(self.act_fn, *_SILU):
            return super().forward(x)
        gate_up = packed_linear(x, (self.gate_proj, self.up_proj), alone=between_norms)
        if gate_up is None:
            return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return swiglu_linear(gate_up, self.down_proj, between_norms)


class ForgeQwen3DecoderLayer(Qwen3DecoderLayer):
    """Both residual additions in one kernel with the norm that reads the sum."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if is_compiling():
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        # A checkpoint hands on the sum alone: what it carries would be computed twice for nothing.
        checkpointed = self.gradient_checkpointing and self.training
        # A sum and its norm are results of one node: what a hook on the layer sees of the sum's
        # gradient would lack the norm's part.
        watched = not is_plain(self, ForgeQwen3DecoderLayer)
        if watched:
            hidden_states.__dict__.pop("_forge_normed", None)
        alone = checkpointed or watched
        (following,) = (None,) if alone else self.__dict__.get("_following", (None,))
        after = self.post_attention_layernorm
        between = {"between_norms": True}
        x, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            **kwargs,
            **(between if _is_between(self.input_layernorm, self.self_attn, after) else {}),
        )
        h = _add(after, x, hidden_states)
        x = self.mlp(after(h), **(between if _is_between(after, self.mlp, following) else {}))
        return _add(following, x, h)


def _is_between(before: nn.Module, block: nn.Module, after: nn.Module | None) -> bool:
    """Whether nothing but ``block`` reads what ``before`` makes, and nothing but ``after`` its.

    Then parts of a sum may go from one to the next (:func:`forge.kernels.linear_auto.parts_of`).
    """
    # Somebody may have put blocks of his own there, which have no such layer.
    if not linear_auto.HOPPER or not is_plain(block, ForgeQwen3Attention, ForgeQwen3MLP):
        return False
    last: Any = block.o_proj if isinstance(block, ForgeQwen3Attention) else block.down_proj
    return (
        is_plain(before, ForgeQwen3RMSNorm)
        and is_plain(last, ForgeLinear)
        and after is not None
        and is_plain(after, ForgeQwen3RMSNorm)
        and before.weight.device == last.weight.device == after.weight.device
    )


REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    Qwen3RMSNorm: ForgeQwen3RMSNorm,
    Qwen3RotaryEmbedding: ForgeQwen3RotaryEmbedding,
    Qwen3Attention: ForgeQwen3Attention,
    Qwen3MLP: ForgeQwen3MLP,
    Qwen3DecoderLayer: ForgeQwen3DecoderLayer,
}


def packed_layers(module: nn.Module) -> tuple[nn.Module, ...]:
    """The layers whose weights ``module`` reads as one."""
    if isinstance(module, ForgeQwen3Attention):
        return module.q_proj, module.k_proj, module.v_proj
    if isinstance(module, ForgeQwen3MLP):
        return module.gate_proj, module.up_proj
    return ()


def link(model: Qwen3Model) -> None:
    """Tell each layer which norm reads its sum."""
    norms = [layer.input_layernorm for layer in model.layers[1:]] + [model.norm]
    for layer, norm in zip(model.layers, norms, strict=True):
        # In a tuple: a module among a module's attributes would become its child.
        layer.__dict__["_following"] = (norm,)


@lru_cache
def _positions(forward: Callable) -> list[str]:
    return list(signature(forward).parameters)[1:]


# Keeps the signature: trainers and `generate` read from it what the model takes.
@wraps(Qwen3ForCausalLM.forward, assigned=())
def forward_with_fused_loss(self: Qwen3ForCausalLM, *args: Any, **kwargs: Any) -> Any:
    """``Qwen3ForCausalLM.forward`` that, given labels in training, returns the loss alone."""
    plain = type(self).forward
    if is_compiling():
        return plain(self, *args, **kwargs)
    kwargs |= dict(zip(_positions(plain), args, strict=False))
    if not _is_fusable(self, kwargs):
        return plain(self, **kwargs)
    labels = kwargs.pop("labels")
    for name in ("logits_to_keep", "return_dict"):
        kwargs.pop(name, None)
    if kwargs.get("position_ids") is None:
        # With positions, transformers tells packed sequences apart only where there is no cache.
        kwargs["use_cache"] = False
        if kwargs.get("attention_mask") is None and _needs_no_mask(self.config):
            # While a CUDA graph is captured transformers builds the causal mask, and attention with
            # a mask takes three times as long.
            kwargs["attention_mask"] = {"full_attention": None}
            kwargs["position_ids"] = _counted(self.model, kwargs)
    outputs = self.model(**kwargs)
    ignored = kwargs.get("ignore_index", -100)
    targets = kwargs.get("shift_labels")
    if targets is None:
        targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]
    hidden, weight = outputs.last_hidden_state, self.lm_head.weight
    slot = slot_of(weight) if type(self.lm_head) is ForgeLinear else None
    handed = slot is not None and slot.node is not None and weight.dtype == hidden.dtype
    at_once = slot is not None and handed and slot.split is not None
    row_bytes = hidden.shape[:-1].numel() * hidden.element_size()
    loss = linear_cross_entropy(
        hidden,
        weight,
        targets.reshape(hidden.shape[:-1]).to(hidden.device),
        ignore_index=ignored,
        count=kwargs.get("num_items_in_batch"),
        chunk=_chunk(row_bytes, weight.shape[0], at_once),
        collect=slot.collect if slot is not None and handed else None,
    )
    return CausalLMOutputWithPast(
        loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions
    )


def _counted(model: Qwen3Model, kwargs: dict[str, Any]) -> Tensor | None:
    """Positions with their tables; None: let the model make them."""
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    rotary, weight = model.rotary_emb, getattr(model.embed_tokens, "weight", None)
    if not isinstance(rotary, ForgeQwen3RotaryEmbedding) or not rotary.is_counting():
        return None
    start = weight if embeds is None else embeds
    given = ids if embeds is None else embeds
    if start is None or given is None or given.dim() < 2 or start.device != rotary.inv_freq.device:
        return None
    return rotary.count(given.shape[1], start.dtype)


def _needs_no_mask(config: Any) -> bool:
    """Whether attention is told by a flag that it is causal, in every layer."""
    known = ("sdpa", "flash_attention_2", "flash_attention_3")
    return config._attn_implementation in known and set(config.layer_types) == {"full_attention"}


def _chunk(row_bytes: int, vocabulary: int, at_once: bool) -> int | None:
    """How many entries of the vocabulary a slice has; None: keep all logits."""
    limit, size = LOGITS_BYTES, SLICE_BYTES
    if at_once:
        limit = size = CAPTURED_LOGITS_BYTES
    if row_bytes * vocabulary <= limit:
        return None
    return max(128, size // row_bytes // 128 * 128)


def _is_fusable(model: Qwen3ForCausalLM, kwargs: dict[str, Any]) -> bool:
    """Whether the call trains with transformers' own loss, on all tokens, without a cache."""
    kept = kwargs.get("logits_to_keep", 0)
    return_dict = kwargs.get("return_dict")
    return (
        model.training
        and torch.is_grad_enabled()
        and kwargs.get("labels") is not None
        and isinstance(kept, int)
        and kept == 0
        and not kwargs.get("use_cache")
        and kwargs.get("cache") is None
        and kwargs.get("past_key_values") is None
        and bool(model.config.return_dict if return_dict is None else return_dict)
        and model.loss_function is ForCausalLMLoss
        and plain_weight(model.lm_head) is not None
    )
