"""What a causal language model is made of, as far as operations and bytes depend on it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.harness.workloads import MODELS

MODEL_HELP = f"{', '.join(MODELS)}, or a Hugging Face configuration: folder or json"
# Decoders of attention and a gated MLP. Anything else (experts, Mamba, latent attention) does other
# work than these formulas count, and is refused.
_QK_NORM = {"qwen3", "gemma3_text"}
_FOUR_NORMS = {"gemma2", "gemma3_text"}
DENSE = {"qwen2", "qwen3", "llama", "mistral", "phi3", "gemma2", "gemma3_text"}
# `sliding_window` alone means every layer.
_ALL_SLIDE = {"mistral", "phi3"}


@dataclass(frozen=True)
class Gemm:
    """A linear of every layer, or the head: weight ``[outputs, inputs]``."""

    name: str
    outputs: int
    inputs: int

    @property
    def weights(self) -> int:
        """Elements of the weight."""
        return self.outputs * self.inputs


@dataclass(frozen=True)
class Parameter:
    """``count`` parameters of one shape; ``hidden`` marks matrices of attention and MLP."""

    dims: tuple[int, ...]
    count: int
    hidden: bool = False

    @property
    def numel(self) -> int:
        """Elements of one of them."""
        return self.dims[0] * (self.dims[1] if len(self.dims) > 1 else 1)


@dataclass(frozen=True)
class Shape:
    """A dense decoder.

    Attributes:
        windows: of each layer, how many keys a query sees; ``None``: all before it.
        qk_norm: queries and keys are normalised head by head.
        norms: norms of width ``hidden`` in a layer.
        tied: the head is the embedding.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    windows: tuple[int | None, ...]
    tied: bool
    qk_norm: bool
    norms: int

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @property
    def q_width(self) -> int:
        """Width of the queries, and of attention's output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The linears of a layer, as products: q, k, v are one, gate and up are one."""
        return (
            Gemm("qkv", self.q_width + 2 * self.kv_width, self.hidden),
            Gemm("o", self.hidden, self.q_width),
            Gemm("gate+up", 2 * self.intermediate, self.hidden),
            Gemm("down", self.hidden, self.intermediate),
        )

    @property
    def head(self) -> Gemm:
        """The output projection."""
        return Gemm("head", self.vocab, self.hidden)

    @property
    def layer_weights(self) -> int:
        """Weights of the linears of one layer."""
        return sum(gemm.weights for gemm in self.gemms)

    @property
    def linear_weights(self) -> int:
        """Weights that every token is multiplied with: the linears of all layers, and the head."""
        return self.layers * self.layer_weights + self.head.weights

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every trainable parameter, as Hugging Face stores them (biases left out)."""
        q, kv, hidden, inner = self.q_width, self.kv_width, self.hidden, self.intermediate
        matrices = (
            Parameter((q, hidden), self.layers, True),
            Parameter((kv, hidden), 2 * self.layers, True),
            Parameter((hidden, q), self.layers, True),
            Parameter((inner, hidden), 2 * self.layers, True),
            Parameter((hidden, inner), self.layers, True),
            Parameter((self.vocab, hidden), 1 if self.tied else 2),
            Parameter((hidden,), self.norms * self.layers + 1),
        )
        return (*matrices, Parameter((self.head_dim,), 2 * self.layers if self.qk_norm else 0))

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(parameter.count * parameter.numel for parameter in self.parameters)

    def pairs(self, seq: int) -> dict[str, float]:
        """Query-key pairs of a sequence, summed over the layers of each type.

        A causal layer has ``seq^2 / 2``; one with a window ``w < seq`` has ``w seq - w^2 / 2``.
        """
        found: dict[str, float] = {}
        for window, layers in Counter(self.windows).items():
            seen = min(window or seq, seq)
            kind = "full attention" if window is None else "sliding attention"
            found[kind] = found.get(kind, 0.0) + layers * (seen * seq - seen**2 / 2)
        return found


def shape_of(config: Any) -> Shape:
    """The :class:`Shape` of a transformers configuration (of its text part).

    Raises:
        ValueError: an architecture whose operations are not counted here.
    """
    config = config.get_text_config()
    kind = config.model_type
    if kind not in DENSE:
        raise ValueError(
            f"model_type {kind!r}: its operations are not counted; those of "
            f"{', '.join(sorted(DENSE))} are"
        )
    head_dim = getattr(config, "head_dim", None)
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        windows=_windows(config),
        tied=config.tie_word_embeddings,
        qk_norm=kind in _QK_NORM,
        norms=4 if kind in _FOUR_NORMS else 2,
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    slides = window if config.model_type in _ALL_SLIDE else None
    return (slides,) * config.num_hidden_layers


def load_shape(model: str) -> tuple[str, Shape]:
    """Name and shape of a known model, or of a Hugging Face configuration on disk.

    Args:
        model: a key of ``MODELS``, a folder with a ``config.json``, or such a file.

    Raises:
        ValueError: neither, or an architecture that is not counted.
    """
    if model in MODELS:
        return MODELS[model].name, shape_of(MODELS[model].hf_config())
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"model {model!r}: not one of {', '.join(MODELS)}, nor a configuration (folder or json)"
        )
    from transformers import AutoConfig

    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(
            f"model {model}: no configuration that transformers knows: {reason}"
        ) from error
    return (file.parent.name if file.name == "config.json" else file.stem), shape_of(config)
