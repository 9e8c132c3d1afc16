"""Step counts, quantiles, FLOPs, and which attention ran."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge.harness import timing
from forge.harness.attention import attention_backend
from forge.harness.efficiency import mfu_pct, model_flops
from forge.harness.shapes import shape_of
from forge.harness.workloads import MODELS, build_model


def test_time_steps_cycles_through_the_batches():
    seen = []

    def step(batch):
        seen.append(batch)
        return batch

    samples, last = timing.time_steps(step, ["a", "b", "c"], 5, "cpu", start=2)
    assert seen == ["c", "a", "b", "c", "a"] and last == "a"
    assert len(samples) == 5 and all(sample > 0 for sample in samples)


def test_fast_rows_take_more_steps():
    assert timing.steps_needed([900.0, 11.0, 11.0, 11.0]) == 200
    assert timing.steps_needed([150.0] * 20) == 20


def test_quantiles_and_slow_steps():
    samples = [1.0, 2.0, 3.0, 4.0, 100.0]
    p20, p50, p80 = timing.quantiles(samples)
    assert (p20, p50) == (pytest.approx(1.8), 3.0) and 4.0 < p80 < 100.0
    assert timing.slow_steps(samples) == [4]


@pytest.mark.parametrize("name", MODELS)
def test_linear_weights_count_the_real_model(name):
    config = MODELS[name].hf_config()
    with torch.device("meta"):
        from transformers import Qwen3ForCausalLM

        model = Qwen3ForCausalLM(config)
    counted = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert shape_of(config).linear_weights == counted


def test_flops_of_a_step():
    config = MODELS["qwen3-0.6b"].hf_config()
    attention = 28 * 6 * 512**2 * 16 * 128
    assert model_flops(config, 1, 512) == 6 * shape_of(config).linear_weights * 512 + attention
    assert mfu_pct(989.4e12 * 0.01, 20.0, "H200") == pytest.approx(50.0)
    assert mfu_pct(1e12, 20.0, "AMD EPYC") is None


@pytest.mark.parametrize("kernels", ["hf", "torch", "forge"])
def test_attention_backend_names_what_ran(kernels):
    config = MODELS["qwen3-tiny"].hf_config(layers=1)
    model = build_model(
        config, device="cpu", dtype=torch.bfloat16, attention="sdpa", kernels=kernels, seed=0
    )
    ids = torch.arange(32)[None]
    batch = {"input_ids": ids, "labels": ids}
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_backend(model, batch) == "sdpa:math"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert attention_backend(model, batch) == "sdpa:flash"


def test_every_kernel_variant_starts_from_the_same_weights():
    config = MODELS["qwen3-tiny"].hf_config(layers=1)
    common = dict(device="cpu", dtype=torch.float32, attention="sdpa", seed=3)
    ids = torch.arange(64)[None]
    losses = [
        build_model(config, kernels=kernels, **common)(input_ids=ids, labels=ids).loss.item()
        for kernels in ("hf", "torch", "hf", "forge")
    ]
    assert losses[0] == losses[2] and losses[1::2] == pytest.approx([losses[0]] * 2, rel=1e-5)
    other = build_model(config, kernels="hf", **{**common, "seed": 4})
    assert other(input_ids=ids, labels=ids).loss.item() != losses[0]
