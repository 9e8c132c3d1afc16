"""Floors: the worked-out figures of the default work and of table models, part by part."""

from __future__ import annotations

import json

import pytest

from command_line import forge_bench
from forge.harness import hardware
from forge.harness.efficiency import flops_by_layer, step_tile_share, tile_share
from forge.harness.hardware import HARDWARE
from forge.harness.roofline import STATES, floor
from forge.harness.shapes import load_shape, shape_of
from forge.harness.workloads import MODELS

H200 = HARDWARE["h200"]


def groups(seq, states="bf16"):
    """GFLOP, GB and floor in ms of the default model, linears of the layers summed."""
    found = floor(load_shape("qwen3-0.6b")[1], 1, seq, H200, states)
    sums: dict[str, list[float]] = {}
    for part in found["parts"]:
        kind, _, what = part["name"].partition(" ")
        name = f"linear {what}" if kind in ("qkv", "o", "gate+up", "down") else part["name"]
        for i, value in enumerate((part["flops"] / 1e9, part["bytes"] / 1e9, part["ms"])):
            sums.setdefault(name, [0.0, 0.0, 0.0])[i] += value
    return sums, found


# Worked out by hand: 440.4e6 weights in the layers, 155.6e6 in the head, 790 TFLOP/s, 4.3 TB/s.
@pytest.mark.parametrize(
    ("seq", "name", "gflop", "gb", "ms"),
    [
        (512, "linear forward", 451, 1.44, 0.571),
        (512, "linear dX", 451, 1.44, 0.571),
        (512, "linear dW + update", 451, 5.84, 1.359),
        (512, "attention forward", 30, 0.18, 0.041),
        (512, "attention backward", 75, 0.35, 0.095),
        (512, "head forward", 159, 0.47, 0.202),
        (512, "head dX", 159, 0.47, 0.202),
        (512, "head dW + update", 159, 2.02, 0.471),
        (512, "logits to their gradient", 0, 0.31, 0.072),
        (512, "norms, RoPE, activation", 0, 1.67, 0.389),
        (4096, "linear forward", 3608, 5.34, 4.57),
        (4096, "linear dX", 3608, 5.34, 4.57),
        (4096, "linear dW + update", 3608, 9.75, 4.57),
        (4096, "attention forward", 1924, 1.42, 2.44),
        (4096, "attention backward", 4810, 2.83, 6.09),
        (4096, "head forward", 1275, 1.56, 1.61),
        (4096, "head dW + update", 1275, 3.12, 1.61),
        (4096, "logits to their gradient", 0, 2.49, 0.579),
        (4096, "norms, RoPE, activation", 0, 13.4, 3.11),
    ],
)
def test_parts_of_the_default_model(seq, name, gflop, gb, ms):
    got = groups(seq)[0][name]
    assert got[0] == pytest.approx(gflop, abs=0.6)
    assert got[1] == pytest.approx(gb, abs=0.006 if gb < 10 else 0.06)
    assert got[2] == pytest.approx(ms, abs=0.006 if ms > 1.5 else 0.0006)


@pytest.mark.parametrize(
    ("seq", "states", "total", "elementwise", "separate"),
    [
        (512, "bf16", 3.51, 3.97, 4.39),
        (512, "int8", 2.96, 3.42, 3.84),
        (4096, "bf16", 27.07, 30.76, 29.01),
        (4096, "int8", 27.07, 30.76, 28.45),
    ],
)
def test_sums_of_the_default_model(seq, states, total, elementwise, separate):
    found = groups(seq, states)[1]
    assert found["total_ms"] == pytest.approx(total, abs=0.006)
    assert found["total_elementwise_ms"] == pytest.approx(elementwise, abs=0.006)
    assert found["total_separate_update_ms"] == pytest.approx(separate, abs=0.006)


def test_fp32_states_move_20_bytes_a_weight():
    shape = load_shape("qwen3-0.6b")[1]
    sums = {states: floor(shape, 1, 512, H200, states)["gb"] for states in STATES}
    assert sums["fp32"] - sums["bf16"] == pytest.approx(8 * shape.linear_weights / 1e9)


def _config(kind, **dims):
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, pad_token_id=0, **dims)


def llama():
    return _config(
        "llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def phi():
    return _config(
        "phi3",
        vocab_size=200_064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=24,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )


# Derived independently, with the same two rates.
@pytest.mark.parametrize(
    ("shape", "billions", "at_512", "at_4096"),
    [
        (lambda: load_shape("qwen3-1.7b")[1], 1.72, (9.7, 12.4), (62.0, 67.6)),
        (lambda: load_shape("qwen3-4b")[1], 4.02, (22.5, 29.1), (147, 160)),
        (lambda: load_shape("qwen3-8b")[1], 8.19, (41.7, 54.4), (257, 282)),
        (lambda: shape_of(llama()), 8.03, (41.3, 53.9), (253, 277)),
        (lambda: shape_of(phi()), 3.84, (21.3, 27.6), (134, 146)),
    ],
)
def test_floors_of_other_models(shape, billions, at_512, at_4096):
    assert shape().numel / 1e9 == pytest.approx(billions, abs=0.006)
    for seq, (fused, separate) in ((512, at_512), (4096, at_4096)):
        found = floor(shape(), 1, seq, H200, "bf16")
        close = dict(abs=0.06 if seq == 512 else 0.6)
        assert found["total_ms"] == pytest.approx(fused, **close)
        assert found["total_separate_update_ms"] == pytest.approx(separate, **close)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name):
    import torch
    from transformers import Qwen3ForCausalLM

    config = MODELS[name].hf_config()
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    real = sorted(tuple(p.shape) for p in model.parameters())
    shape = shape_of(config)
    assert sorted(d for p in shape.parameters for d in [p.dims] * p.count) == real


def test_flops_are_those_that_pytorch_counts():
    """Linears exactly; attention, whose masked half PyTorch computes and counts, at half."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3ForCausalLM

    config = MODELS["qwen3-tiny"].hf_config(layers=2)
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config)
    ids = torch.randint(config.vocab_size, (3, 32))
    # The fused kernels of a CPU are not counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    flops = flops_by_layer(shape_of(config), 3, 32)
    linears = sum(value for name, value in flops.items() if "linears" in name)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = sum(n for op, n in counts.items() if "bmm" in op)
    assert sum(counts.values()) - attention == linears
    assert attention == 2 * flops["full attention"]


def test_a_sliding_window_sees_fewer_keys():
    shape = shape_of(_config("mistral", sliding_window=64, num_hidden_layers=3))
    assert shape.pairs(64) == {"sliding attention": 3 * 64 * 64 / 2}
    assert shape.pairs(256) == {"sliding attention": 3 * (64 * 256 - 64 * 64 / 2)}
    mixed = _config(
        "gemma2",
        sliding_window=64,
        layer_types=["full_attention", "sliding_attention"],
        num_hidden_layers=2,
    )
    assert shape_of(mixed).pairs(256) == {
        "full attention": 256 * 256 / 2,
        "sliding attention": 64 * 256 - 64 * 64 / 2,
    }


def test_the_text_part_of_a_multimodal_configuration_counts(tmp_path):
    text = dict(model_type="gemma3_text", num_hidden_layers=3, hidden_size=640)
    path = tmp_path / "both.json"
    path.write_text(json.dumps(dict(model_type="gemma3", text_config=text)))
    name, shape = load_shape(str(path))
    assert (name, shape.layers, shape.hidden) == ("both", 3, 640)
    assert (shape.norms, shape.qk_norm) == (4, True)


def test_whole_tiles():
    assert tile_share(512, 1024, 4096, (128, 128, 64)) == 1.0
    assert tile_share(129, 128, 64, (128, 128, 64)) == pytest.approx(129 / 256)
    config = MODELS["qwen3-0.6b"].hf_config()
    assert step_tile_share(config, 1, 512) == 1.0
    assert step_tile_share(config, 1, 513) == pytest.approx(
        # Of the three products of a linear, two pad 513 tokens to 640, one to 576.
        3 / (2 * 640 / 513 + 576 / 513)
    )


@pytest.mark.parametrize(
    ("name", "key", "clock"),
    [
        ("NVIDIA H200", "h200", 1830),
        ("H200", "h200", 1830),
        ("NVIDIA H200 NVL", "h200-nvl", 1545),
        ("NVIDIA H100 80GB HBM3", "h100", 1830),
        ("NVIDIA A100-SXM4-80GB", "a100", 1410),
        ("NVIDIA A100 80GB PCIe", "a100", 1410),
        ("NVIDIA B200", "b200", 1856),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 2520),
        ("NVIDIA GH200 480GB", None, 0),
        ("NVIDIA GeForce RTX 4090 D", None, 0),
        ("AMD EPYC", None, 0),
    ],
)
def test_hardware_by_the_drivers_name(name, key, clock):
    found = hardware.find(name)
    assert (found and found.key) == key
    if found:
        assert found.tensor_clock_mhz == pytest.approx(clock, abs=1)


def test_achievable_is_below_the_data_sheet():
    for gpu in HARDWARE.values():
        assert 0.7 < gpu.gemm_tflops / gpu.peak_tflops < 0.95, gpu.key
        assert 0.8 < gpu.copy_tb_s / gpu.bandwidth_tb_s < 0.95, gpu.key


def test_command(monkeypatch, capsys, tmp_path):
    options = "--batch 1 --seq 512 --hardware h200 --json".split()
    assert forge_bench(monkeypatch, "roofline", "qwen3-0.6b", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total_ms"] == pytest.approx(3.51, abs=0.006)
    assert (found["model"], found["seq"], found["states"]) == ("Qwen3-0.6B", 512, "bf16")
    llama().save_pretrained(tmp_path / "my-llama")
    for path in (tmp_path / "my-llama", tmp_path / "my-llama" / "config.json"):
        assert forge_bench(monkeypatch, "roofline", str(path), *options) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["model"] == "my-llama" and round(found["total_ms"], 1) == 41.3
    assert forge_bench(monkeypatch, "roofline", "qwen3-tiny", "--hardware", "rtx4090") == 0
    shown = capsys.readouterr().out
    assert "head dW + update" in shown and "floor of the step" in shown and "hidden" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("roofline", "Missing argument"),
        ("roofline nope", "model 'nope': not one of qwen3-tiny"),
        ("roofline {tmp}/broken.json", "no configuration that transformers knows"),
        ("roofline {tmp}/list.json", "no configuration that transformers knows"),
        ("roofline {tmp}/new.json", "no configuration that transformers knows"),
        ("roofline {tmp}/mamba.json", "model_type 'mamba': its operations are not counted"),
        ("roofline qwen3-tiny --hardware v100", "--hardware: unknown 'v100'; valid: h200"),
        ("roofline qwen3-tiny --states fp7", "--states: unknown 'fp7'; valid: bf16"),
        ("roofline qwen3-tiny --seq 1", "--seq"),
    ],
)
def test_refusals(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "new.json").write_text('{"model_type": "not-yet-written"}')
    (tmp_path / "mamba.json").write_text('{"model_type": "mamba"}')
    assert forge_bench(monkeypatch, *arguments.format(tmp=tmp_path).split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("forge-bench: ") and message in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
