"""``forge.optimize`` on models that others change: hooks, adapters, blocks, copies, checkpoints."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

import forge
from forge.packed_linear import packed_linear, packed_view
from small_qwen3 import batch, gradients, make, same


def halve(_module: nn.Module, args: Any, output: Any = None) -> None:
    """Halves the gradient of what goes into, or comes out of, a layer."""
    seen = args[0] if output is None else output
    seen.register_hook(lambda grad: grad * 0.5)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_see_the_whole_gradient_between_layers(interpreter, register):
    found = []
    for change in (lambda model: model, forge.optimize):
        model = change(make())
        getattr(model.model.layers[1 if "pre" in register else 0], register)(halve)
        found.append(gradients(model, **batch()))
    same(*reversed(found))


class Own(nn.Module):
    """A block of one's own, around the model's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("wrapped", ["self_attn", "mlp", "input_layernorm", "mlp.down_proj"])
@pytest.mark.parametrize("before", [True, False])
def test_blocks_of_ones_own(wrapped, before):
    parent, _, name = f"model.layers.0.{wrapped}".rpartition(".")
    losses = []
    for optimized in (False, True):
        model = make()
        if optimized and not before:
            forge.optimize(model)
        owner = model.get_submodule(parent)
        setattr(owner, name, Own(getattr(owner, name)))
        if optimized and before:
            forge.optimize(model)
        losses.append(model(**batch()).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses)


def test_checkpoints(tmp_path):
    model = forge.optimize(make())
    plain = make().state_dict()
    assert list(model.state_dict()) == list(plain)
    model.save_pretrained(tmp_path / "hf")
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded) is Qwen3ForCausalLM and loaded.config.architectures == ["Qwen3ForCausalLM"]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, plain[name]), name
    forge.optimize(loaded)
    torch.save(model.state_dict(), tmp_path / "torch.pt")
    saved = torch.load(tmp_path / "torch.pt")
    for assign in (False, True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(saved, assign=assign)
        model.tie_weights()
        same(gradients(model, **batch()), gradients(make(), **batch()))


def groups(model: nn.Module) -> list[list[Tensor]]:
    found = []
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        found.append([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        found.append([m.gate_proj.weight, m.up_proj.weight])
    return found


def test_packing_survives_conversions_and_copies():
    model = forge.optimize(make())
    assert all(packed_view(group) is not None for group in groups(model))
    model.to(torch.float64).to(torch.float32)
    assert all(packed_view(group) is None for group in groups(model))
    same(gradients(model, **batch()), gradients(make(), **batch()))
    assert all(packed_view(group) is not None for group in groups(model))
    twin = copy.deepcopy(model)
    same(gradients(twin, **batch()), gradients(make(), **batch()))
    ours = {p.data_ptr() for p in model.parameters()}
    assert not ours & {p.data_ptr() for p in twin.parameters()}


def test_neighbours_by_chance_are_not_packed():
    memory = torch.randn(6, 4)
    parts = [torch.from_numpy(memory.numpy()[a:b]) for a, b in ((0, 2), (2, 6))]
    assert parts[0].data_ptr() + parts[0].nbytes == parts[1].data_ptr()
    assert packed_view(parts) is None


def test_optimize_is_idempotent_and_undone():
    model = make()
    classes = [type(module) for module in model.modules()]
    names = [name for name, _ in model.named_modules()]
    parameters = list(model.parameters())
    state = copy.deepcopy(model.state_dict())
    assert forge.optimize(model) is model
    places = [p.data_ptr() for p in parameters]
    swapped = [type(module) for module in model.modules()]
    forge.optimize(model)
    assert swapped == [type(module) for module in model.modules()] != classes
    assert places == [p.data_ptr() for p in parameters]
    assert names == [name for name, _ in model.named_modules()]
    assert all(isinstance(m, c) for m, c in zip(model.modules(), classes, strict=True))
    for _ in range(2):
        forge.optimize(model, undo=True)
        assert classes == [type(module) for module in model.modules()]
        attributes = set().union(*(module.__dict__ for module in model.modules()))
        assert not attributes & {"forward", "_following"}
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    storages = {p.untyped_storage().data_ptr() for p in parameters}
    assert len(storages) == len(parameters)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert model(**batch()).logits is not None


@pytest.mark.parametrize("around", ["hook", "adapter"])
def test_undone_with_layers_that_are_no_longer_plain(around):
    model = forge.optimize(make())
    attention = model.model.layers[0].self_attn
    if around == "hook":
        attention.q_proj.register_forward_hook(lambda *_: None)
    else:
        attention.q_proj = Own(attention.q_proj)
    forge.optimize(model, undo=True)
    parameters = list(model.parameters())
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)


class Adapter(nn.Module):
    """A LoRA layer as adapters build it: the plain layer inside, a low-rank branch beside."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def adapt(model: Any) -> Any:
    torch.manual_seed(3)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    return model


@pytest.mark.parametrize("first", ["optimize", "adapt"])
def test_adapters(first):
    plain = adapt(make())
    ours = forge.optimize(adapt(make())) if first == "adapt" else adapt(forge.optimize(make()))
    same(gradients(ours, **batch()), gradients(plain, **batch()))


@pytest.mark.parametrize("first", ["optimize", "adapt"])
def test_peft(first):
    peft = pytest.importorskip("peft")

    def wrapped(model: Any) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "gate_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(model, config)

    ours = forge.optimize(wrapped(make())) if first == "adapt" else wrapped(forge.optimize(make()))
    same(gradients(ours, **batch()), gradients(wrapped(make()), **batch()))
    merged = [m.merge_and_unload().eval()(**batch()).logits for m in (ours, wrapped(make()))]
    torch.testing.assert_close(*merged, rtol=1e-4, atol=1e-4)


def test_signature_and_pickles_stay(tmp_path):
    model = forge.optimize(make())
    assert inspect.signature(model.forward) == inspect.signature(make().forward)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    same(gradients(loaded, **batch()), gradients(make(), **batch()))


def test_hooks_of_projections_run():
    model = forge.optimize(make())
    seen = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: seen.append("k"))
    model.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *_: seen.append("q_norm"))
    model.model.layers[1].mlp.up_proj.register_full_backward_hook(lambda *_: seen.append("up"))
    model.model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    found = gradients(model, **batch())
    assert sorted(seen) == ["k", "norm", "q_norm", "up"]
    same(found, gradients(make(), **batch()))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_the_activation_run(kind):
    calls = []

    def halve(_module: nn.Module, values: Any, *output: Any) -> Any:
        calls.append(kind)
        return output[0] * 0.5 if kind == "forward" else (values[0] * 0.5,)

    found = []
    for change in (lambda model: model, forge.optimize):
        model = change(make())
        getattr(model.model.layers[0].mlp.act_fn, f"register_{kind}_hook")(halve)
        found.append(gradients(model, **batch()))
    assert len(calls) == 2
    same(*reversed(found))


def test_an_activation_of_ones_own():
    found = []
    for change in (lambda model: model, forge.optimize):
        model = change(make())
        model.model.layers[1].mlp.act_fn = nn.GELU()
        found.append(gradients(model, **batch()))
    same(*reversed(found))


def test_hooks_of_all_modules_run_for_each():
    found = []
    for change in (lambda model: model, forge.optimize):
        model = change(make())
        called: Counter[nn.Module] = Counter()
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, *_, called=called: called.update([module])
        )
        try:
            grads = gradients(model, **batch())
        finally:
            handle.remove()
        found.append((grads, {name: called[module] for name, module in model.named_modules()}))
    (plain, calls), (ours, our_calls) = found
    assert our_calls == calls
    same(ours, plain)


def test_a_sum_changed_by_a_hook_is_normalised_again():
    def halve(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
        out.mul_(0.5)

    models = [make(), forge.optimize(make())]
    for model in models:
        model.model.layers[0].register_forward_hook(halve)
    with torch.no_grad():
        a, b = (model(**batch()).logits for model in models)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_packed_linear_leaves_alone_what_it_cannot_pack():
    x = torch.randn(3, 8)
    a, b = nn.Linear(8, 4, bias=False), nn.Linear(8, 6, bias=False)
    y = packed_linear(x, [a, b])
    torch.testing.assert_close(y, torch.cat([a(x), b(x)], -1))
    assert packed_linear(x, [a, nn.Linear(8, 6)]) is None  # bias
    assert packed_linear(x, [a, nn.Linear(8, 6, bias=False).double()]) is None
    assert packed_linear(x, [a, nn.Identity()]) is None

    def transformed(row: Tensor) -> Tensor:
        assert packed_linear(row, [a, b]) is None
        return a(row)

    torch.testing.assert_close(torch.func.vmap(transformed)(x), a(x))
