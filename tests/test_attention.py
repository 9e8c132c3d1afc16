"""Causal attention against fp64 truth, in the reference, Triton's interpreter and on a GPU.

Criterion, as in test_model_kernels.py: no larger an error than torch's own SDPA in the same dtype,
plus a tolerance for sums in another order and, since SDPA on a CPU keeps p and ds in fp32, for
their rounding.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import typer
from transformers import Qwen3Config, Qwen3ForCausalLM

import forge
from forge import qwen3
from forge.harness import options
from forge.harness.attention import attention_backend
from forge.harness.rows import select_rows
from forge.harness.workloads import MODELS, build_model
from forge.kernels import attention_backward as module
from forge.kernels import runtime
from forge.kernels.attention import attention, attention_reference

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.5e-3, torch.float16: 2e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16", "fp16"])
# Batch, heads of queries, of keys, tokens, head size: groups of 1, 2, 4 and 8.
SHAPES = [(1, 2, 1, 1, 16), (2, 4, 2, 33, 32), (1, 8, 1, 65, 16), (1, 2, 2, 130, 64)]
SHAPES += [(1, 4, 1, 66, 128)]


def error(found, truth):
    """Relative; of one token alone, whose queries and keys have no gradient, absolute."""
    assert found.shape == truth.shape
    return ((found.cpu().double() - truth).norm() / truth.norm().clamp(min=1)).item()


def packed(batch, heads, kv, tokens, size, dtype):
    """Views of a packed projection, inside a larger buffer of NaN that nobody may read."""
    buffer = torch.full((batch, tokens + 70, (heads + 2 * kv + 1) * size), math.nan, dtype=dtype)
    qkv = buffer[:, :tokens, size:]
    qkv.normal_()
    parts = qkv.unflatten(-1, (-1, size)).split([heads, kv, kv], dim=2)
    return [t.transpose(1, 2) for t in parts]


def head_major(batch, heads, kv, tokens, size, dtype):
    return [torch.randn(batch, n, tokens, size, dtype=dtype) for n in (heads, kv, kv)]


def misaligned(batch, heads, kv, tokens, size, dtype):
    """Rows that start anywhere, and the elements of a head apart."""
    q, k, v = head_major(batch, heads, kv, tokens, size + 1, dtype)
    return [q[..., 1:], k[..., :-1], v[..., 1:].transpose(2, 3).contiguous().transpose(2, 3)]


def run(fn, tensors, upstream, device="cpu"):
    leaves = []
    for t in tensors:
        # A copy would lose the layout; the buffer around a view goes along.
        base = t.detach() if t._base is None else t._base.detach()
        moved = base.to(device).as_strided(t.shape, t.stride(), t.storage_offset())
        leaves.append(moved.detach().requires_grad_())
    out = fn(*leaves)
    out.backward(upstream.to(device, out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def sdpa(q, k, v, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def check(tensors, device, scale=None, slack=0.0):
    dtype = tensors[0].dtype
    wide = [t.double() for t in tensors]
    upstream = torch.randn(tensors[0].shape).to(dtype).double()
    exact = run(lambda *t: attention_reference(*t, scale), wide, upstream)
    theirs = run(lambda *t: sdpa(*t, scale), tensors, upstream)
    mine = run(lambda *t: attention(*t, scale), tensors, upstream, device)
    if runtime.interpret_cpu and dtype == torch.bfloat16:
        slack = 2**-7  # Triton's interpreter truncates where the GPU rounds
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), mine, theirs, exact, strict=True):
        assert a.dtype == dtype
        assert error(a, c) <= error(b, c) + TOLERANCE[dtype] + slack, name


@pytest.fixture(params=[True, False], ids=["split", "whole"])
def split(request, monkeypatch):
    """Whether a group of query heads is spread over programs in backward."""
    monkeypatch.setattr(module, "_SPLIT_TOKENS", 10**9 if request.param else 0)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_inputs(device, split, dtype, shape):
    check(packed(*shape, dtype), device)


@pytest.mark.parametrize("layout", [head_major, misaligned])
def test_other_layouts(device, layout):
    check(layout(2, 4, 2, 19, 32, torch.float32), device)
    check(layout(2, 4, 2, 19, 32, torch.bfloat16), device)


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_scale(device, scale):
    check(head_major(1, 2, 1, 40, 16, torch.float32), device, scale)


def test_scores_far_from_zero(device):
    """Exponentials that would overflow without the running maximum, which grows along the row."""
    q, k, v = head_major(1, 2, 1, 100, 16, torch.float32)
    k = k * torch.linspace(1, 60, 100)[:, None]
    # The exponents, up to 250, are 8e-6 apart.
    check([q, k, v], device, slack=8e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 16, 8, 512, 128), (3, 16, 4, 1000, 128), (1, 8, 8, 2049, 64)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_of_models(split, dtype, shape):
    check(packed(*shape, dtype), "cuda")


@pytest.mark.gpu
def test_offsets_beyond_31_bits():
    size, heads, tokens = 64, 2, 80
    span = 2**31 + 1024
    buffer = torch.empty(span + tokens * heads * size, dtype=torch.bfloat16, device="cuda")
    strides = (span, size, heads * size, 1)
    far = [buffer.as_strided((2, heads, tokens, size), strides) for _ in range(3)]
    far[0].normal_()
    out = attention(*far)
    torch.testing.assert_close(out, attention(*(t.contiguous() for t in far)), rtol=0, atol=0)
    dout = torch.randn_like(out)
    grads = []
    for tensors in (far, [t.contiguous() for t in far]):
        leaves = [t.detach().requires_grad_() for t in tensors]
        attention(*leaves).backward(dout)
        grads.append([leaf.grad for leaf in leaves])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("turn", [0, 5, 16])
def test_the_order_of_programs_does_not_matter(device, monkeypatch, turn):
    monkeypatch.setattr(module, "_turn", lambda programs, q: turn)
    check(packed(1, 4, 2, 70, 16, torch.bfloat16), device)


def test_the_longest_programs_share_a_multiprocessor_with_the_shortest():
    on_cpu = torch.empty(1)  # counts as four multiprocessors
    assert [module._turn(n, on_cpu) for n in (3, 5, 8, 9, 100)] == [4, 4, 4, 9, 100]


def test_the_output_lies_as_the_next_projection_reads_it(device):
    q, k, v = (t.to(device) for t in packed(2, 4, 2, 7, 16, torch.float32))
    out = attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()


def test_a_gradient_that_is_one_number(device):
    """``sum().backward()`` hands on a tensor of one element, expanded."""
    tensors = [t.to(device).requires_grad_() for t in head_major(1, 2, 1, 9, 16, torch.float32)]
    attention(*tensors).sum().backward()
    truth = [t.detach().clone().requires_grad_() for t in tensors]
    attention_reference(*truth).sum().backward()
    for a, b in zip(tensors, truth, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["no batch", "no tokens"])
def test_nothing(device, shape):
    batch, tokens = shape
    q = torch.randn(batch, 2, tokens, 16, device=device, requires_grad=True)
    k = torch.randn(batch, 1, tokens, 16, device=device, requires_grad=True)
    attention(q, k, k).sum().backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape


def test_two_runs_give_the_same_bits(device, split):
    tensors = packed(1, 4, 2, 100, 16, torch.bfloat16)
    upstream = torch.randn(tensors[0].shape)
    first, second = (run(attention, tensors, upstream, device) for _ in range(2))
    assert all(map(torch.equal, first, second))


def of(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: attention(of(1, 2, 4, 24), of(1, 2, 4, 24), of(1, 2, 4, 24)), "q: .*24"),
        (lambda: attention(of(2, 4, 16), of(2, 4, 16), of(2, 4, 16)), "q: "),
        (lambda: attention(of(1, 2, 4, 16), of(1, 2, 5, 16), of(1, 2, 5, 16)), "k: .* tokens"),
        (lambda: attention(of(1, 2, 4, 16), of(1, 2, 4, 16), of(1, 1, 4, 16)), "v: 1 heads"),
        (lambda: attention(of(1, 3, 4, 16), of(1, 2, 4, 16), of(1, 2, 4, 16)), "k: 2 heads"),
        (lambda: attention(of(1, 2, 4, 16), of(1, 2, 4, 16).half(), of(1, 2, 4, 16)), "k: .*16"),
        (lambda: attention(*[of(1, 2, 4, 16)] * 3, scale=0.0), "scale=0.0"),
        (lambda: attention(*[of(1, 2, 4, 16)] * 3, scale=math.nan), "scale=nan"),
    ],
)
def test_inputs_that_do_not_fit(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_fp64_is_for_the_reference(device):
    q = torch.ones(1, 2, 4, 16, dtype=torch.float64, device=device)
    if not runtime.runs_triton(q):
        assert attention(q, q, q).dtype == torch.float64
        return
    with pytest.raises(ValueError, match="q: torch.float64"):
        attention(q, q, q)


# -- in a model -------------------------------------------------------------------------------


@pytest.fixture
def interpreted(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setattr(runtime, "interpret_cpu", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def make(**changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **heads, **changes})).train()


def batch(tokens=20):
    ids = torch.randint(0, 97, (1, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_a_model_computes_the_same(interpreted, monkeypatch):
    calls = []
    kernel = qwen3.qkv_attention
    monkeypatch.setattr(
        qwen3, "qkv_attention", lambda *a, **k: calls.append(a[0].shape) or kernel(*a, **k)
    )
    model = forge.optimize(make(), attention="forge")
    found = gradients(model, **batch())
    assert calls == [(1, 20, 128)] * 2
    for a, b in zip(found, gradients(make(), **batch()), strict=True):
        assert error(a, b.double()) <= 2e-5
    assert attention_backend(model, batch()) == "forge"
    # Asking again decides again; undoing forgets.
    for again in ({}, {"attention": "sdpa"}, {"attention": "forge", "undo": True}):
        forge.optimize(model, **again)
        assert attention_backend(model, batch()).startswith("sdpa:")
    assert len(calls) == 4 and "_attention" not in model.model.layers[0].self_attn.__dict__


def test_what_auto_takes(monkeypatch):
    """Up to SHORT tokens, in half precision, on Hopper, where no mask is needed."""
    q = torch.empty(1, 2, 512, 16, dtype=torch.bfloat16)
    assert not qwen3._is_short(q)
    monkeypatch.setattr(qwen3, "SHORT", 512)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    class OnGPU:
        is_cuda, device = True, "cuda"

        def __init__(self, tokens=512, size=2):
            self.shape, self.bytes = (1, 2, tokens, 16), size

        def element_size(self):
            return self.bytes

    assert qwen3._is_short(OnGPU()) and not qwen3._is_short(q)
    assert not qwen3._is_short(OnGPU(tokens=513)) and not qwen3._is_short(OnGPU(size=4))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not qwen3._is_short(OnGPU())


def test_auto_leaves_to_sdpa_what_the_kernel_cannot_do(interpreted, monkeypatch):
    monkeypatch.setattr(qwen3, "_is_short", lambda q: True)
    model = forge.optimize(make())
    assert attention_backend(model, batch()) == "forge"
    padded = {**batch(), "attention_mask": torch.tensor([[0] * 9 + [1] * 11])}
    for a, b in zip(gradients(model, **padded), gradients(make(), **padded), strict=True):
        assert error(a, b.double()) <= 2e-5
    assert attention_backend(model, padded).startswith("sdpa:")


CANNOT = {
    "mask": ({}, {"attention_mask": torch.tensor([[0] * 9 + [1] * 11])}),
    "packed": (
        {},
        {"position_ids": torch.cat([torch.arange(8), torch.arange(12)])[None], "use_cache": False},
    ),
    "dropout": ({"attention_dropout": 0.1}, {}),
    "configured with eager": ({"attn_implementation": "eager"}, {}),
    "size of 24": ({"head_dim": 24}, {}),
    "this layer is not": ({"is_causal": False}, {}),
    "position_bias": ({}, {"position_bias": torch.zeros(1, 4, 20, 20)}),
}


@pytest.mark.parametrize(("named", "case"), CANNOT.items(), ids=CANNOT)
def test_what_forge_cannot_do_raises(interpreted, named, case):
    changes, inputs = case
    model = forge.optimize(make(**changes), attention="forge")
    with pytest.raises(ValueError, match=f'attention="forge": .*{named}.*; use forge.optimize'):
        model(**batch(), **inputs)


def test_another_attention_of_the_same_name_is_asked(interpreted, monkeypatch):
    """Libraries that put theirs in the place of SDPA mean every layer."""
    monkeypatch.setattr(qwen3, "_is_short", lambda q: True)
    sdpa, calls = qwen3.ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def other(*args, **kwargs):
        calls.append(None)
        return sdpa(*args, **kwargs)

    monkeypatch.setitem(qwen3.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", other)
    forge.optimize(make())(**batch())
    assert len(calls) == 2
    with pytest.raises(ValueError, match="another one was registered as 'sdpa'"):
        forge.optimize(make(), attention="forge")(**batch())


def test_forge_needs_a_gpu_and_takes_no_part_in_autocast():
    model = forge.optimize(make(), attention="forge")
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        model(**batch())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        model(**batch())


def test_generation_runs_the_plain_module():
    model = forge.optimize(make(), attention="forge").eval()
    ids = batch(5)["input_ids"]
    how = dict(max_new_tokens=4, do_sample=False)
    plain = make().eval().generate(ids, **how)
    assert torch.equal(model.generate(ids, **how), plain)


@pytest.mark.gpu
def test_a_captured_step_attends_as_the_loop():
    found = []
    for graph in (True, False):
        sizes = dict(hidden_size=128, num_attention_heads=8, head_dim=64)
        model = make(**sizes).to("cuda", torch.bfloat16)
        forge.optimize(model, attention="forge")
        optimizer = forge.ForgeAdamW(model, lr=1e-3, rounding="nearest", path="tiles")
        step = forge.TrainStep(model, optimizer, graph=graph)
        inputs = {n: t.to("cuda") for n, t in batch(150).items()}
        found.append([step(**inputs).item() for _ in range(4)])
    assert found[0] == pytest.approx(found[1], rel=1e-3) and found[0][-1] < found[0][0]


def test_an_unknown_attention():
    with pytest.raises(ValueError, match="attention='flash': must be one of auto, sdpa, forge"):
        forge.optimize(make(), attention="flash")


def test_rows_that_have_no_kernel_of_ours_are_refused(capsys):
    for kernels, expected in (("forge", None), ("torch", "not for adamw-fused/")):
        rows = select_rows(["adamw-fused"], "cuda", kernels, "eager", None)
        if expected is None:
            assert options.attention("forge", "cuda", rows) == "forge"
            continue
        with pytest.raises(typer.Exit):
            options.attention("forge", "cuda", rows)
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["auto", "sdpa"])
def test_the_benchmark_asks_for_what_it_was_told(asked):
    common = dict(device="cpu", dtype=torch.bfloat16, kernels="forge", seed=0)
    model = build_model(MODELS["qwen3-tiny"].hf_config(), **common, attention=asked)
    assert {layer.self_attn.__dict__["_attention"] for layer in model.model.layers} == {asked}
