"""What is trained: Qwen3-class configurations, and models of them with reproducible weights."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forge.optim.registry import REGISTRY


@dataclass(frozen=True)
class ModelSpec:
    """A Qwen3 configuration. ``name`` is what the leaderboard shows."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 151_936
    tied: bool = True

    def hf_config(self, layers: int | None = None) -> Any:
        """The ``Qwen3Config``; ``layers`` keeps only the first so many."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            rms_norm_eps=1e-6,
            tie_word_embeddings=self.tied,
            attention_bias=False,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )


MODELS: dict[str, ModelSpec] = {
    "qwen3-tiny": ModelSpec("qwen3-tiny", 256, 4, 4, 2, 64, 512, vocab=8_192),
    "qwen3-0.6b": ModelSpec("Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072),
    "qwen3-1.7b": ModelSpec("Qwen3-1.7B", 2048, 28, 16, 8, 128, 6144),
    "qwen3-4b": ModelSpec("Qwen3-4B", 2560, 36, 32, 8, 128, 9728),
    "qwen3-8b": ModelSpec("Qwen3-8B", 4096, 36, 32, 8, 128, 12288, tied=False),
}


@torch.no_grad()
def fill_random(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """Matrices ~ N(0, std^2), vectors 1 (biases 0), drawn in fp32 in the order of the names.

    Independent of how the modules were built, so every kernel variant starts from equal weights.
    """
    generator: torch.Generator | None = None
    for name, parameter in sorted(model.named_parameters()):
        if generator is None:
            generator = torch.Generator(parameter.device).manual_seed(seed)
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        draw = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        parameter.copy_(draw.normal_(0.0, std, generator=generator))


def use_liger(fused_linear_cross_entropy: bool) -> None:
    """Swap Liger's kernels into transformers' Qwen3, before it is constructed.

    RMSNorm, SwiGLU, RoPE and a cross-entropy. The default one is Liger's that works on the logits
    in place: transformers' own makes three fp32 copies of them, which then set the peak memory of
    every method. The fused linear cross-entropy is a row of its own: at 512 tokens it works in 128
    chunks, and its time would hide the optimizer's.

    Patching the classes (not an instance) covers ``q_norm`` and ``k_norm`` too.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    apply_liger_kernel_to_qwen3(
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=not fused_linear_cross_entropy,
        fused_linear_cross_entropy=fused_linear_cross_entropy,
    )


def check_liger(model: nn.Module, fused_linear_cross_entropy: bool) -> None:
    """Raise RuntimeError when a kernel that the row names did not replace the original."""
    from transformers.models.qwen3 import modeling_qwen3

    kinds = {type(module).__name__ for module in model.modules()}
    left = kinds & {"Qwen3RMSNorm", "Qwen3MLP"}
    missing = {"LigerRMSNorm", "LigerSwiGLUMLP"} - kinds
    if left or missing:
        raise RuntimeError(f"Liger did not replace {', '.join(sorted(left or missing))}")
    if "liger" not in modeling_qwen3.apply_rotary_pos_emb.__module__:
        raise RuntimeError("Liger did not replace apply_rotary_pos_emb")
    cross_entropy = torch.nn.functional.cross_entropy.__module__
    if ("liger" in cross_entropy) == fused_linear_cross_entropy:
        raise RuntimeError("Liger's cross-entropy is not in the state the row names")
    if ("liger" in type(model).forward.__module__) != fused_linear_cross_entropy:
        raise RuntimeError("Liger's fused linear cross-entropy is not in the state the row names")


def import_transformers() -> None:
    """Import transformers as if no rival were installed.

    It imports those it knows (torchao), so that one that is broken would fail every row.
    """
    targets = (spec.target for spec in REGISTRY.values() if spec.distribution)
    hidden = {re.split("[.:]", target)[0] for target in targets} - set(sys.modules)
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None: cannot be imported
    try:
        importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    finally:
        for name in hidden:
            del sys.modules[name]


# What transformers is told; "forge" is this package's kernel in place of SDPA, which "auto" takes
# where `forge.optimize` does.
ATTENTION = {"auto": "sdpa", "sdpa": "sdpa", "flash": "flash_attention_2", "forge": "sdpa"}


def build_model(
    config: Any, *, device: str, dtype: torch.dtype, attention: str, kernels: str, seed: int
) -> nn.Module:
    """A causal LM of ``config`` in training mode on ``device``, weights drawn from ``seed``.

    Args:
        config: a transformers configuration.
        attention: ``auto`` (SDPA; with ``forge`` kernels what ``forge.optimize`` takes), ``sdpa``,
            ``flash``, or ``forge``, for ``forge`` kernels.
        kernels: ``hf``, ``liger``, ``liger+flce``, ``torch`` (the plain PyTorch twin), or
            ``forge`` (``forge.optimize``).
    """
    from transformers import AutoModelForCausalLM

    if kernels.startswith("liger"):
        use_liger(kernels == "liger+flce")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION[attention]
        )
    fill_random(model, seed)
    return _finish(model, kernels, attention)


def load_model(
    weights: str, *, device: str, dtype: torch.dtype, attention: str, kernels: str
) -> nn.Module:
    """The checkpoint ``weights`` (a folder or a hub id) in training mode on ``device``."""
    from transformers import AutoModelForCausalLM

    if kernels.startswith("liger"):
        use_liger(kernels == "liger+flce")
    model: Any = AutoModelForCausalLM.from_pretrained(
        weights, dtype=dtype, attn_implementation=ATTENTION[attention]
    )
    model.to(device)
    model.config.use_cache = False
    return _finish(model, kernels, attention)


def _finish(model: nn.Module, kernels: str, attention: str) -> nn.Module:
    if kernels.startswith("liger"):
        check_liger(model, kernels == "liger+flce")
    if kernels == "torch":
        from forge.harness.torch_qwen3 import from_hf

        model = from_hf(model)
    if kernels == "forge":
        from forge import optimize

        # FlashAttention is what the model is configured with, which "sdpa" keeps.
        optimize(model, attention="sdpa" if attention == "flash" else attention)
    return model.train()
