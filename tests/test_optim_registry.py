"""Every optimizer of the registry: importable description, real updates, AdamW parity if exact."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.harness.memory import reachable_tensors
from forge.optim import registry
from forge.optim.groups import split_hidden_linears
from forge.optim.registry import REGISTRY
from forge.optim.spec import Hyper, OptimizerSpec

SPECS = list(REGISTRY.values())
ROOT = Path(__file__).resolve().parents[1]
HYPER = Hyper(lr=1e-3, betas=(0.9, 0.98), eps=1e-7, weight_decay=0.1)
# AdaLomo's learning rate and eps are on scales of their own.
OWN_SCALE = {"adalomo"}
STEPS = 20

# How far 20 steps may end from fp32 AdamW, relative to the distance travelled. fp32 states differ
# by the order of operations only; Adam's first steps are sign-like, which amplifies that.
FP32_STATE_TOLERANCE = 3e-4
# bf16 states carry 2^-9 relative rounding a step into a ratio m / sqrt(v).
BF16_STATE_TOLERANCE = 1e-2


def make_model(**changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    # Few distinct shapes: torchao compiles one kernel for each.
    config = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(config | changes)))


def make_batch(step: int, vocab: int = 128, seq: int = 33) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    input_ids = torch.randint(0, vocab, (2, seq), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids}


def build(spec: OptimizerSpec, model: nn.Module, hyper: Hyper = HYPER) -> Any:
    try:
        target = spec.resolve()
    except ImportError as error:
        pytest.skip(f"{spec.distribution} is not installed: {error}")
    return spec.build(target, model, hyper)


def by_key(specs: list[OptimizerSpec]) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=lambda spec: spec.key)


# -- descriptions -----------------------------------------------------------------------------


def test_keys_and_methods_are_well_formed() -> None:
    listed = [s for name in registry._MODULES for s in import_module(f"forge.optim.{name}").SPECS]
    assert [spec.key for spec in listed] == list(REGISTRY), "a key occurs twice"
    for key, spec in REGISTRY.items():
        assert key == spec.key
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key)
        assert spec.method and spec.summary and spec.licence
        assert spec.devices and set(spec.devices) <= {"cpu", "cuda"}


def test_importing_the_registry_imports_no_rival() -> None:
    own = {"torch", "forge"}
    rivals = {re.split(r"[.:]", spec.target)[0] for spec in SPECS} - own
    assert rivals
    code = f"import sys, forge.optim.registry;print(sorted({rivals!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    assert result.stdout.strip() == "[]"


def test_every_distribution_is_in_the_bench_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=; \[]", line)[0] for line in extras["optional-dependencies"]["bench"]}
    assert {spec.distribution for spec in SPECS if spec.distribution} <= names


def test_missing_package_is_an_import_error() -> None:
    spec = OptimizerSpec("x", "x", "no_such_package_here:Thing", lambda *_: None, "x")
    with pytest.raises(ImportError):
        spec.resolve()


def test_split_hidden_linears_covers_every_trainable_parameter_once() -> None:
    model = make_model(num_hidden_layers=3)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.model.norm.weight.requires_grad_(False)
    hidden, others = split_hidden_linears(model)
    assert len(hidden) == 3 * 7 - 1
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert sorted(map(id, hidden + others)) == sorted(map(id, trainable))
    assert id(model.lm_head.weight) in set(map(id, others))


def test_split_hidden_linears_refuses_a_model_without_them() -> None:
    with pytest.raises(ValueError, match="attn"):
        split_hidden_linears(nn.Sequential(nn.Linear(4, 4)))


# -- updates ----------------------------------------------------------------------------------


def run_three_steps(spec: OptimizerSpec, model: nn.Module, hyper: Hyper) -> None:
    device = next(model.parameters()).device
    optimizer = build(spec, model, hyper)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i in range(3):
        batch = {name: t.to(device) for name, t in make_batch(i).items()}
        loss = model(**batch).loss
        assert loss.isfinite()
        spec.train(optimizer, loss, hyper)
        assert all(p.grad is None for p in model.parameters()), "gradients outlive the step"
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
        # bf16 weights near 1 do not move by 1e-3: half a unit in the last place is 2e-3.
        if p.dtype == torch.float32 or p.ndim == 2:
            assert not torch.equal(p, before[name]), f"{name} did not move"


@by_key([spec for spec in SPECS if "cpu" in spec.devices])
def test_three_steps_move_every_parameter(spec: OptimizerSpec) -> None:
    run_three_steps(spec, make_model(), HYPER)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@by_key([spec for spec in SPECS if "cuda" in spec.devices])
def test_three_steps_move_every_matrix_on_cuda_in_bf16(spec: OptimizerSpec) -> None:
    run_three_steps(spec, make_model().to("cuda", torch.bfloat16), HYPER)


@by_key([spec for spec in SPECS if "cpu" in spec.devices and spec.key not in OWN_SCALE])
def test_effective_hyperparameters_are_those_asked_for(spec: OptimizerSpec) -> None:
    optimizer = build(spec, make_model())
    parts = [optimizer] if hasattr(optimizer, "param_groups") else list(vars(optimizer).values())
    groups = [group for part in parts for group in part.param_groups]
    assert groups
    for group in groups:
        assert float(group["lr"]) == pytest.approx(HYPER.lr)
        assert group["weight_decay"] == HYPER.weight_decay
        if "momentum" in group:  # Muon: one moment, its own eps
            continue
        assert group["eps"] == HYPER.eps
        betas = group.get("betas", (group.get("beta1"), group.get("beta2")))
        assert tuple(betas) == HYPER.betas


# -- parity -----------------------------------------------------------------------------------

PARITY_MODEL = dict(
    vocab_size=199,
    hidden_size=48,
    intermediate_size=112,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
)


def train(
    spec: OptimizerSpec, reload_at: int | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Weights before and after ``STEPS`` fp32 steps, and whether every state tensor is fp32.

    At step ``reload_at`` training moves to a fresh model and a fresh optimizer, loaded from disk.
    """
    model = make_model(**PARITY_MODEL)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build(spec, model)
    for i in range(STEPS):
        if i == reload_at:
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict()), file)
            file.seek(0)
            weights, state = torch.load(file, weights_only=True)
            model = make_model(**PARITY_MODEL)
            model.load_state_dict(weights)
            optimizer = build(spec, model)
            optimizer.load_state_dict(state)
        spec.train(optimizer, model(**make_batch(i, vocab=199)).loss, HYPER)
    floats = [t for t in reachable_tensors(optimizer, skip=model) if t.is_floating_point()]
    assert floats
    full = all(t.dtype in (torch.float32, torch.float64) for t in floats)
    return start, {name: p.detach() for name, p in model.named_parameters()}, full


@pytest.fixture(scope="module")
def reference() -> dict[str, Tensor]:
    """Weights after the same steps of ``torch.optim.AdamW(foreach=False, fused=False)``."""
    model = make_model(**PARITY_MODEL)
    adamw = torch.optim.AdamW(model.parameters(), **HYPER.adamw, foreach=False, fused=False)
    for i in range(STEPS):
        model(**make_batch(i, vocab=199)).loss.backward()
        adamw.step()
        adamw.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@by_key([spec for spec in SPECS if "cpu" in spec.devices and spec.exact])
@pytest.mark.parametrize("reload_at", [None, STEPS // 2], ids=["straight", "reloaded"])
def test_exact_methods_follow_adamw(
    spec: OptimizerSpec, reload_at: int | None, reference: dict[str, Tensor]
) -> None:
    start, end, fp32_states = train(spec, reload_at)
    tolerance = FP32_STATE_TOLERANCE if fp32_states else BF16_STATE_TOLERANCE
    for name, truth in reference.items():
        moved = (truth - start[name]).norm()
        assert (end[name] - truth).norm() <= tolerance * moved, name
