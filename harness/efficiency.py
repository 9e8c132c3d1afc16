"""Model FLOPs of a step and their share of the hardware's peak (MFU)."""

from __future__ import annotations

from typing import Any

# Dense bf16 TFLOP/s by the data sheets; H200 and H100 SXM share the die.
PEAK_TFLOPS = {"H200": 989.4, "H100 80GB HBM3": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756.0}


def model_flops(config: Any, batch: int, seq: int) -> float:
    """Floating-point operations of forward and backward of a Qwen3-class causal LM.

    Linears: 6 a weight and token, the head once. Attention: scores and mix, half of the square
    (causal), backward twice forward. Norms, RoPE, activations and the update are not counted.
    """
    width = config.num_attention_heads * _head_dim(config)
    attention = 6 * batch * seq**2 * width * config.num_hidden_layers
    return 6.0 * linear_weights(config) * batch * seq + attention


def linear_weights(config: Any) -> int:
    """Weights that every token is multiplied with: the linears of all layers, and the head."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    hidden = config.hidden_size
    layer = hidden * _head_dim(config) * heads + 3 * hidden * config.intermediate_size
    return config.num_hidden_layers * layer + hidden * config.vocab_size


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def mfu_pct(flops: float, latency_ms: float, hardware: str) -> float | None:
    """Share of the dense bf16 peak in percent; ``None`` when the peak is not known."""
    for name, peak in PEAK_TFLOPS.items():
        if name in hardware:
            return 100 * flops / (latency_ms * 1e-3) / (peak * 1e12)
    return None
