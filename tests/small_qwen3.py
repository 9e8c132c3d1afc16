"""A small Qwen3, its inputs, and how close two of them must be: for several test files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 199


def make(dtype: torch.dtype = torch.float32, tied: bool = True, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": tied,
            **changes,
        }
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # Norm weights of exactly 1 would hide a norm applied to the wrong tensor.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(4.0)
    return model.to(dtype).train()


def recompute(model: Any, settings: dict[str, Any] | None = None) -> None:
    """Gradient checkpointing, which transformers 5.24 calls activation checkpointing."""
    name = "activation_checkpointing_enable"
    getattr(model, name, model.gradient_checkpointing_enable)(settings)


def batch(tokens: int = 13, rows: int = 2, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, 3:5] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    """The loss, and every gradient by its parameter's name."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def same(ours: dict[str, Tensor], plain: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert ours.keys() == plain.keys()
    for name, truth in plain.items():
        distance = (ours[name] - truth).double().norm() / truth.double().norm().clamp(min=1e-30)
        assert distance <= tolerance, name
