"""The plain PyTorch twin computes what Hugging Face's Qwen3 computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

from forge.harness.torch_qwen3 import IGNORED_LABEL, TorchQwen3, from_hf
from small_qwen3 import VOCAB, make

# bf16 rounds at other places in the twin than in Hugging Face's model, so single tensors scatter;
# over all gradients together the twin may not lose more than Hugging Face does.
TENSOR_MARGIN = 1.5


def make_hf(tied: bool = True, **changes: Any) -> Qwen3ForCausalLM:
    sizes = dict(intermediate_size=112, num_hidden_layers=3, use_cache=False)
    return make(tied=tied, **(sizes | changes))


def make_batch(seq: int = 37) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, VOCAB, (2, seq), generator=generator)
    labels = input_ids.clone()
    labels[0, 3:9] = IGNORED_LABEL
    return {"input_ids": input_ids, "labels": labels}


def hf_gradients(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    """Gradients of the Hugging Face model under the twin's names, packed as the twin packs."""

    def packed(*modules: nn.Module) -> Tensor:
        return torch.cat([module.weight.grad for module in modules])

    inner = model.model
    grads = {
        "embed_tokens.weight": packed(inner.embed_tokens),
        "norm.weight": packed(inner.norm),
    }
    if model.lm_head.weight is not inner.embed_tokens.weight:
        grads["lm_head.weight"] = packed(model.lm_head)
    for i, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        modules = {
            "input_norm": (layer.input_layernorm,),
            "post_attention_norm": (layer.post_attention_layernorm,),
            "self_attn.qkv_proj": (attention.q_proj, attention.k_proj, attention.v_proj),
            "self_attn.o_proj": (attention.o_proj,),
            "self_attn.q_norm": (attention.q_norm,),
            "self_attn.k_norm": (attention.k_norm,),
            "mlp.gate_up_proj": (mlp.gate_proj, mlp.up_proj),
            "mlp.down_proj": (mlp.down_proj,),
        }
        grads |= {f"layers.{i}.{name}.weight": packed(*m) for name, m in modules.items()}
    return grads


def run_twin(model: TorchQwen3, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def run_hf(model: Qwen3ForCausalLM, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), hf_gradients(model)


def relative_error(found: Tensor, truth: Tensor) -> float:
    scale = truth.double().norm().clamp(min=1e-30)
    return ((found.double() - truth.double()).norm() / scale).item()


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("seq", [1, 2, 37])
def test_equals_hugging_face_in_fp32(tied: bool, seq: int) -> None:
    hf = make_hf(tied)
    batch = make_batch(seq)
    if seq == 1:
        # One token predicts nothing: the mean over no labels is NaN in both models.
        assert from_hf(hf)(**batch).loss.isnan() and hf(**batch).loss.isnan()
        return
    loss, grads = run_twin(from_hf(hf), batch)
    hf_loss, hf_grads = run_hf(hf, batch)
    assert relative_error(loss, hf_loss) < 1e-5
    assert grads.keys() == hf_grads.keys()
    for name, grad in grads.items():
        assert relative_error(grad, hf_grads[name]) < 1e-5, name


def test_bf16_is_as_close_to_fp32_as_hugging_face() -> None:
    batch = make_batch()
    truth_loss, truth = run_hf(make_hf(), batch)
    hf = make_hf().bfloat16()
    loss, grads = run_twin(from_hf(hf), batch)
    hf_loss, hf_grads = run_hf(hf, batch)
    assert loss.dtype == torch.float32
    assert abs(loss - truth_loss) <= abs(hf_loss - truth_loss) + 1e-3
    hf_error = relative_error(flat(hf_grads), flat(truth))
    assert relative_error(flat(grads), flat(truth)) <= hf_error + 1e-3
    for name, grad in grads.items():
        hf_error = relative_error(hf_grads[name], truth[name])
        assert relative_error(grad, truth[name]) <= TENSOR_MARGIN * hf_error + 1e-3, name


def test_weights_are_copies_and_tying_is_kept() -> None:
    hf = make_hf()
    twin = from_hf(hf)
    assert twin.lm_head.weight is twin.embed_tokens.weight
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in hf.parameters())
    before = hf(**make_batch()).loss
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(hf(**make_batch()).loss, before)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "layer_types",
        ),
    ],
)
def test_unsupported_configuration_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        from_hf(make_hf(**changes))


LLAMA = dict(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    use_cache=False,
)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_equals_hugging_face_in_fp32(tied: bool) -> None:
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.ndim == 1 else parameter.mul_(4.0)
    batch = make_batch()
    loss, grads = run_twin(from_hf(hf), batch)
    hf_loss = hf(**batch).loss
    hf_loss.backward()
    assert relative_error(loss, hf_loss) < 1e-5
    attention, mlp = hf.model.layers[1].self_attn, hf.model.layers[1].mlp
    packed = {
        "layers.1.self_attn.qkv_proj": (attention.q_proj, attention.k_proj, attention.v_proj),
        "layers.1.mlp.gate_up_proj": (mlp.gate_proj, mlp.up_proj),
        "layers.1.mlp.down_proj": (mlp.down_proj,),
        "embed_tokens": (hf.model.embed_tokens,),
    }
    for name, modules in packed.items():
        truth = torch.cat([module.weight.grad for module in modules])
        assert relative_error(grads[f"{name}.weight"], truth) < 1e-5, name


def test_an_mlp_bias_of_llama_is_refused() -> None:
    with pytest.raises(ValueError, match="mlp_bias=True"):
        from_hf(LlamaForCausalLM(LlamaConfig(**LLAMA, mlp_bias=True)))


def test_another_architecture_is_refused_by_name():
    from transformers import MistralConfig, MistralForCausalLM

    with pytest.raises(ValueError, match="model_type='mistral'; use kernels='hf'"):
        from_hf(MistralForCausalLM(MistralConfig(**LLAMA)))
