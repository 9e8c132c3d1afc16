"""``forge.optimize``: swap a Hugging Face model's modules for ones that use our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

# Imported with the package, not with the first model: Triton decides while a kernel is decorated
# whether it will be interpreted.
import forge.kernels.attention  # noqa: F401  (its name is an argument's below)
from forge.kernels import (  # noqa: F401
    linear_cross_entropy,
    qkv_attention,
    rms_norm,
    rope_tables,
    swiglu,
)
from forge.packed_linear import pack, plain_weight, unpack

ATTENTION = ("auto", "sdpa", "forge")
SUPPORTED = "Qwen3 (dense: Qwen3ForCausalLM, Qwen3Model and the other heads on it)"


def optimize(
    model: nn.Module, *, fused_loss: bool = True, attention: str = "auto", undo: bool = False
) -> Any:
    """Make a Hugging Face model train faster, in place; what it computes stays, up to rounding.

    - q, k, v and gate, up become one product each: their weights move into one buffer. Parameters,
      their names and ``state_dict`` stay, and so does an optimizer that holds them, of this package
      or not, built before or after.
    - Norms with the residual addition in front of them, the tables of the rotary embedding, the
      norms and rotation of q and k, and SwiGLU run as one kernel each.
    - In training mode, given ``labels``, the head computes the loss without fp32 logits, and
      ``output.logits`` is None; a KV cache is made only where ``use_cache=True`` asks for it.

    Left alone, while the rest is swapped: layers that are no plain ``nn.Linear`` (adapters,
    quantized weights, biases, hooks), an activation with hooks or other than SiLU, attention with a
    KV cache, a custom ``loss_function``.
    ``torch.compile`` sees the plain model. On a CPU the same modules run plain PyTorch. Calling it
    again changes nothing; after replacing modules, call it again to swap the new ones.

    Args:
        model: the model, or any module around it.
        fused_loss: False keeps the plain head, and so the logits, in training too.
        attention: "forge" takes this package's causal attention in place of SDPA, and raises in
            the forward pass where it cannot (a mask, dropout, autocast, another implementation, a
            CPU); with a KV cache and under ``torch.compile`` the plain module runs, as ever.
            "sdpa" keeps what the model was configured with; "auto" takes ours where it can run and
            is known to be faster: up to 4,096 tokens in bf16 or fp16, on Hopper.
        undo: restore the plain modules, with every weight in memory of its own.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: nothing in ``model`` is of a supported architecture, or ``attention`` is none
            of the three.
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: must be a torch.nn.Module")
    if attention not in ATTENTION:
        raise ValueError(f"attention={attention!r}: must be one of {', '.join(ATTENTION)}")
    try:
        from forge import qwen3
    except ImportError:
        raise _unsupported(model) from None
    known = (*qwen3.REPLACED, qwen3.Qwen3Model)
    modules = [module for module in model.modules() if isinstance(module, known)]
    if not modules:
        raise _unsupported(model)
    plain = {new: old for old, new in qwen3.REPLACED.items()}
    swaps = plain if undo else qwen3.REPLACED
    module: Any
    for module in modules:
        if undo:
            unpack(qwen3.packed_layers(module))
        new = swaps.get(type(module))
        other_activation = new is qwen3.ForgeQwen3MLP and module.config.hidden_act != "silu"
        if new is not None and not other_activation:
            module.__class__ = new  # type: ignore[assignment]
        module.__dict__.pop("_attention", None)
        if undo:
            module.__dict__.pop("_following", None)
        else:
            _pack(qwen3.packed_layers(module))
            if isinstance(module, qwen3.Qwen3Model):
                qwen3.link(module)
            if isinstance(module, qwen3.ForgeQwen3Attention):
                module.__dict__["_attention"] = attention
    for module in model.modules():
        if isinstance(module, qwen3.Qwen3ForCausalLM):
            _swap_head(module, qwen3.forward_with_fused_loss, fused_loss and not undo)
    return model


def _pack(layers: Sequence[nn.Module]) -> None:
    weights = [weight for layer in layers if (weight := plain_weight(layer)) is not None]
    if layers and len(weights) == len(layers):
        pack(weights)


def _swap_head(head: nn.Module, forward: Any, fused: bool) -> None:
    """Exchange ``head.forward``, unless somebody else already has.

    Not its class: its name is what checkpoints and ``transformers`` know the model by.
    """
    found = head.__dict__.get("forward")
    if fused and found is None:
        head.__dict__["forward"] = partial(forward, head)
    elif not fused and getattr(found, "func", None) is forward:
        del head.__dict__["forward"]


def _unsupported(model: nn.Module) -> ValueError:
    return ValueError(
        f"model: forge.optimize does not know {type(model).__name__}; it supports {SUPPORTED}. "
        "ForgeAdamW(model) works without it, for any model"
    )
