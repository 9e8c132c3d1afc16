"""The model's kernels against fp64 truth, in the reference, Triton's interpreter and on a GPU.

Criterion: over a whole tensor the relative error is no larger than that of plain torch, written as
transformers writes it, in the same dtype, plus a tolerance for sums in another order.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge.kernels import qk_norm_rope_backward, runtime
from forge.kernels import swiglu as swiglu_module
from forge.kernels.column_sum import column_sums
from forge.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from forge.kernels.qk_norm_rope import norm_rope_reference, qk_norm_rope, qkv_norm_rope
from forge.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from forge.kernels.swiglu import packed_swiglu, swiglu, swiglu_reference

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
EPS = 1e-6


def error(found: Tensor, truth: Tensor) -> float:
    assert found.shape == truth.shape
    scale = truth.norm().clamp(min=1e-30)
    return ((found.cpu().double() - truth).norm() / scale).item()


def run(fn, tensors, upstream, device="cpu"):
    """Outputs of ``fn``, and gradients of all ``tensors``, as CPU tensors."""
    leaves = [t.detach().to(device).requires_grad_() for t in tensors]
    out = fn(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    grads = [g.to(device=device, dtype=o.dtype) for o, g in zip(out, upstream, strict=True)]
    torch.autograd.backward(out, grads)
    return [*out, *(leaf.grad for leaf in leaves)]


def check(ours, plain, truth, tensors, device, roundings=0.0):
    """All take ``tensors``; ``truth`` in fp64. ``roundings``: what ours has and plain torch not."""
    dtype = tensors[0].dtype
    outs = truth(*(t.double() for t in tensors))
    outs = outs if isinstance(outs, tuple) else (outs,)
    upstream = [torch.randn_like(o).to(dtype).double() for o in outs]
    exact = run(truth, [t.double() for t in tensors], upstream)
    theirs = run(plain, tensors, upstream)
    mine = run(ours, tensors, upstream, device)
    # Triton's interpreter truncates where the GPU rounds.
    slack = 2**-7 if runtime.interpret_cpu and dtype == torch.bfloat16 else roundings
    for i, (a, b, c) in enumerate(zip(mine, theirs, exact, strict=True)):
        assert a.dtype == b.dtype, i
        assert error(a, c) <= error(b, c) + TOLERANCE[dtype] + slack, i


def plain_rms_norm(x, w):
    """As transformers' Qwen3RMSNorm."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(x.dtype)


# Rows that are not dense, and whose length is no power of two.
def strided(tokens, columns, dtype):
    return torch.randn(tokens, columns + 3, dtype=dtype)[:, 1 : columns + 1]


@DTYPES
@pytest.mark.parametrize(("tokens", "columns"), [(1, 48), (3, 1024), (129, 80), (513, 16)])
def test_rms_norm(device, dtype, tokens, columns):
    x, w = strided(tokens, columns, dtype), torch.randn(columns, dtype=dtype)
    check(
        lambda x, w: rms_norm(x, w, EPS),
        plain_rms_norm,
        lambda x, w: rms_norm_reference(x, w, EPS)[0],
        [x, w],
        device,
    )


@DTYPES
@pytest.mark.parametrize(("tokens", "columns"), [(1, 16), (127, 136), (3, 5000)])
def test_add_rms_norm(device, dtype, tokens, columns):
    x, w = strided(tokens, columns, dtype), torch.randn(columns, dtype=dtype)
    residual = torch.randn(columns, tokens, dtype=dtype).t()

    def plain(x, residual, w):
        h = residual + x
        return plain_rms_norm(h, w), h

    check(
        lambda x, r, w: add_rms_norm(x, r, w, EPS),
        plain,
        lambda x, r, w: rms_norm_reference(x, w, EPS, r),
        [x, residual, w],
        device,
    )


def test_rms_norm_of_a_sum_whose_parts_are_used_alone(device):
    x, r = torch.randn(5, 32, device=device), torch.randn(5, 32, device=device)
    w = torch.ones(32, device=device, requires_grad=True)
    for pick in (0, 1):
        leaf = x.clone().requires_grad_()
        add_rms_norm(leaf, r, w, EPS)[pick].sum().backward()
        truth = x.clone().requires_grad_()
        rms_norm_reference(truth, w, EPS, r)[pick].sum().backward()
        torch.testing.assert_close(leaf.grad, truth.grad)


def test_rms_norm_mixed_dtypes_and_frozen_weight(device):
    """fp32 residual stream and bf16 branches, as under autocast."""
    x = torch.randn(7, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    r = torch.randn(7, 64, device=device, requires_grad=True)
    w = torch.rand(64, device=device)
    y, h = add_rms_norm(x, r, w, EPS)
    assert y.dtype == h.dtype == torch.float32
    (y * h).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and r.grad.dtype == torch.float32
    truth = r.detach().clone().requires_grad_()
    y, h = rms_norm_reference(x.detach(), w, EPS, truth)
    (y * h).sum().backward()
    torch.testing.assert_close(r.grad, truth.grad, rtol=1e-5, atol=1e-5)


def plain_rope(x, w, cos, sin):
    """As transformers' Qwen3Attention, [B, T, H*D] to [B, H, T, D]."""
    x = plain_rms_norm(x.unflatten(-1, (-1, w.shape[0])), w).transpose(1, 2)
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rotation(batch, tokens, size, dtype):
    # Of no position: both halves differ, so that mixing them up shows.
    angles = torch.rand(batch, tokens, size) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


HEADS = [(2, 1, 19, 16), (9, 3, 1, 64), (16, 8, 2, 16), (4, 4, 3, 128), (3, 1, 5, 80)]


@DTYPES
@pytest.mark.parametrize(("heads", "kv", "tokens", "size"), HEADS)
def test_qkv_norm_rope(device, dtype, heads, kv, tokens, size):
    shared = tokens in (1, 19)
    cos, sin = rotation(1 if shared else 2, tokens, size, dtype)
    qkv = torch.randn(2, tokens, (heads + 2 * kv) * size + 5, dtype=dtype)[..., 5:]
    wq, wk = torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)
    sizes = [heads * size, kv * size, kv * size]

    def by(rope):
        def fn(qkv, wq, wk):
            q, k, v = qkv.split(sizes, -1)
            args = (cos.to(q.dtype), sin.to(q.dtype))
            v = v.unflatten(-1, (kv, size)).transpose(1, 2)
            return rope(q, wq, *args), rope(k, wk, *args), v

        return fn

    check(
        lambda qkv, wq, wk: qkv_norm_rope(qkv, wq, wk, cos.to(device), sin.to(device), heads, EPS),
        by(plain_rope),
        by(lambda *a: norm_rope_reference(*a, EPS)),
        [qkv, wq, wk],
        device,
    )


@pytest.mark.parametrize(("heads", "kv", "tokens", "size"), [(9, 3, 17, 64), (2, 1, 40, 16)])
def test_qkv_norm_rope_of_long_sequences(device, monkeypatch, heads, kv, tokens, size):
    """Programs of backward that go through several tiles."""
    monkeypatch.setattr(qk_norm_rope_backward, "_WAVES", 0)
    test_qkv_norm_rope(device, torch.float32, heads, kv, tokens, size)


@DTYPES
def test_qk_norm_rope_of_separate_projections(device, dtype):
    heads, kv, tokens, size = 6, 2, 13, 32
    cos, sin = rotation(1, tokens, size, dtype)
    q, k = (torch.randn(3, tokens, n * size, dtype=dtype) for n in (heads, kv))
    wq, wk = torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)

    def by(rope):
        def fn(q, k, wq, wk):
            args = (cos.to(q.dtype), sin.to(q.dtype))
            return rope(q, wq, *args), rope(k, wk, *args)

        return fn

    check(
        lambda q, k, wq, wk: qk_norm_rope(q, k, wq, wk, cos.to(device), sin.to(device), EPS),
        by(plain_rope),
        by(lambda *a: norm_rope_reference(*a, EPS)),
        [q, k, wq, wk],
        device,
    )


def test_queries_and_keys_lie_as_attention_wants_them(device):
    cos, sin = rotation(1, 4, 16, torch.float32)
    qkv = torch.randn(2, 4, 8 * 16, device=device)
    w = torch.ones(16, device=device)
    q, k, v = qkv_norm_rope(qkv, w, w, cos.to(device), sin.to(device), 4)
    assert all(t.transpose(1, 2).is_contiguous() for t in (q, k))
    assert v.data_ptr() == qkv[..., 6 * 16 :].data_ptr()


@DTYPES
# Programs of one block, and of three and two in backward.
@pytest.mark.parametrize(
    ("tokens", "columns"), [(1, 1), (3, 1030), (127, 48), (9, 2500), (8, 2048)]
)
def test_swiglu(device, dtype, tokens, columns):
    gate, up = strided(tokens, columns, dtype), torch.randn(columns, tokens, dtype=dtype).t()
    check(swiglu, lambda g, u: F.silu(g) * u, swiglu_reference, [gate * 3, up], device)


def test_blocks_of_a_program_of_swiglu():
    found = [swiglu_module._blocks_of_a_program(512, n, 132) for n in (1, 2, 3, 4, 5, 6, 12)]
    assert found == [1, 2, 3, 4, 1, 3, 4]
    assert swiglu_module._blocks_of_a_program(263, 3, 132) == 1  # too few to fill the GPU


@DTYPES
@pytest.mark.parametrize("overwrite", [True, False])
def test_packed_swiglu(device, dtype, overwrite):
    gate_up = torch.randn(2, 33, 2 * 72, dtype=dtype) * 3

    def by(fn):
        return lambda x: fn(*x.chunk(2, -1))

    check(
        # A product with 1, so that what is overwritten is not the leaf.
        lambda x: packed_swiglu(x * 1, overwrite),
        by(lambda g, u: F.silu(g) * u),
        by(swiglu_reference),
        [gate_up],
        device,
    )


def test_overwriting_spares_a_kept_graph(device):
    x = torch.randn(3, 64, device=device, requires_grad=True)
    private = x * 1
    before = private.detach().clone()
    loss = packed_swiglu(private, overwrite=True).square().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    assert torch.equal(private, before)
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, first)
    if runtime.runs_triton(x):
        assert not torch.equal(private, before), "the gradient was not written in place"


def plain_head(hidden, weight, labels, count=None):
    """As transformers' ForCausalLMLoss, of labels that are shifted already."""
    logits = F.linear(hidden, weight).float()
    if count is None:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / count


def head_case(tokens, columns, vocab, dtype):
    hidden = torch.randn(tokens, columns, dtype=dtype)
    weight = torch.randn(vocab, columns, dtype=dtype) * 0.3
    labels = torch.randint(0, vocab, (tokens,))
    labels[1::3] = -100
    return hidden, weight, labels


@DTYPES
@pytest.mark.parametrize("chunk", [None, 1000, 64])
@pytest.mark.parametrize("count", [None, 7])
@pytest.mark.parametrize(("tokens", "columns", "vocab"), [(1, 16, 199), (17, 48, 4999)])
def test_linear_cross_entropy(device, dtype, chunk, count, tokens, columns, vocab):
    if chunk == 64 and vocab > 1000:
        chunk = 1700
    hidden, weight, labels = head_case(tokens, columns, vocab, dtype)
    counts = None if count is None else torch.tensor(float(count))

    def ours(hidden, weight):
        return linear_cross_entropy(
            hidden, weight, labels.to(hidden.device), count=count, chunk=chunk
        )

    check(
        ours,
        lambda h, w: plain_head(h, w, labels, count),
        lambda h, w: linear_cross_entropy_reference(h, w, labels, counts, -100),
        [hidden, weight],
        device,
        # The logits' gradient exists before the loss's arrives, which scales the products.
        roundings=1e-3 if dtype == torch.bfloat16 else 0.0,
    )


@pytest.mark.parametrize("chunk", [None, 50])
def test_no_valid_label(device, chunk):
    """NaN as in torch, but no NaN reaches a weight."""
    hidden, weight, labels = head_case(4, 16, 199, torch.float32)
    hidden, weight = (t.to(device).requires_grad_() for t in (hidden, weight))
    labels = torch.full_like(labels, -100, device=device)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    assert loss.isnan() and F.cross_entropy(hidden @ weight.t(), labels).isnan()
    loss.backward()
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("chunk", [None, 16])
def test_an_ignored_label_may_be_an_entry_of_the_vocabulary(device, chunk):
    hidden, weight, _ = head_case(4, 16, 64, torch.float32)
    labels = torch.tensor([1, 60, 2, 60])
    found = linear_cross_entropy(
        hidden.to(device), weight.to(device), labels.to(device), ignore_index=60, chunk=chunk
    )
    wanted = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=60)
    torch.testing.assert_close(found.cpu(), wanted)


@pytest.mark.parametrize("chunk", [None, 50])
def test_label_outside_the_vocabulary(device, chunk):
    hidden, weight, labels = head_case(4, 16, 199, torch.float32)
    labels[0] = 199
    arguments = [t.to(device) for t in (hidden, weight, labels)]
    if runtime.runs_triton(arguments[0]):
        assert linear_cross_entropy(*arguments, chunk=chunk).isnan()
    else:
        with pytest.raises(IndexError):
            linear_cross_entropy(*arguments, chunk=chunk)


def test_ignored_rows_stay_out_even_if_they_are_not_finite(device):
    hidden, weight, labels = head_case(5, 16, 99, torch.float32)
    hidden[1] = float("nan")
    if not runtime.runs_triton(hidden.to(device)):
        pytest.skip("torch's own spreads NaN")
    hidden, weight = (t.to(device).requires_grad_() for t in (hidden, weight))
    linear_cross_entropy(hidden, weight, labels.to(device)).backward()
    assert not hidden.grad[1].any()


def test_fp16_gradients_use_the_loss_scale(device):
    """A logit's gradient of 1e-8 is no fp16 number; times the loss scale it is."""
    hidden, weight, labels = head_case(3, 16, 999, torch.float16)
    scale = 2.0**16
    leaf, truth = (w.detach().requires_grad_() for w in (weight.to(device), weight.double()))
    loss = linear_cross_entropy(hidden.to(device), leaf, labels.to(device), count=2e4)
    (loss * scale).backward()
    (plain_head(hidden.double(), truth, labels, 2e4) * scale).backward()
    assert error(leaf.grad, truth.grad) < 2e-3


def test_labels_with_strides(device):
    hidden, weight, labels = head_case(6, 16, 99, torch.float32)
    pairs = torch.stack([labels, labels.flip(0)], 1).to(device)[:, 0]
    found = linear_cross_entropy(hidden.to(device), weight.to(device), pairs)
    torch.testing.assert_close(found.cpu(), plain_head(hidden, weight, labels))


@pytest.mark.parametrize("chunk", [None, 40, 99])
def test_factors_of_the_head(device, chunk):
    hidden, weight, labels = head_case(9, 16, 99, torch.float32)
    hidden, weight = (t.to(device).requires_grad_() for t in (hidden, weight))
    taken = torch.full_like(weight, float("nan"))
    seen = []

    def collect(x, dy, rows):
        seen.append(rows)
        taken[slice(*rows or (0, 99))] = dy.t() @ x
        return True

    head = dict(chunk=chunk, collect=collect)
    loss = linear_cross_entropy(hidden, weight, labels.to(device), **head) * 3
    if not runtime.runs_triton(hidden):
        pytest.skip("plain autograd on a CPU")
    loss.backward(retain_graph=True)
    assert seen == ([(59, 99), (19, 59), (0, 19)] if chunk == 40 else [None])
    assert weight.grad is None
    truth = weight.detach().clone().requires_grad_()
    (plain_head(hidden.detach(), truth, labels.to(device)) * 3).backward()
    torch.testing.assert_close(taken, truth.grad, rtol=1e-4, atol=1e-5)
    once = hidden.grad.clone()
    loss.backward()  # what was kept is formed again
    torch.testing.assert_close(hidden.grad, 2 * once)
    torch.testing.assert_close(taken, truth.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_factors_that_nobody_takes(device, dtype):
    hidden, weight, labels = head_case(9, 16, 99, dtype)
    hidden, weight = (t.to(device).requires_grad_() for t in (hidden, weight))
    head = dict(chunk=40, collect=lambda *_: False)
    linear_cross_entropy(hidden, weight, labels.to(device), **head).backward()
    truth = weight.detach().float().requires_grad_()
    plain_head(hidden.detach().float(), truth, labels.to(device)).backward()
    torch.testing.assert_close(weight.grad.float(), truth.grad, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("taken", [True, False])
def test_parts_of_norm_weights(device, taken):
    """Whoever takes them gets all of the gradient, otherwise autograd does."""
    tokens, size = 41, 16
    table = torch.rand(2, 1, tokens, size, device=device)
    parts: list[Tensor] = []

    def collect(rows):
        parts.append(rows)
        return taken

    def norms(x, wq, wk, **collect):
        q, k = qk_norm_rope(x, x, wq, wk, *table, **collect)
        return q.sin().sum() + k.cos().sum()

    x = torch.randn(1, tokens, 9 * size, device=device)
    if not runtime.runs_triton(x):
        pytest.skip("plain autograd on a CPU")
    weights = [torch.rand(n, device=device, requires_grad=True) for n in (9 * size, size, size)]
    y, h = add_rms_norm(x, x, weights[0], collect=collect)
    loss = y.sin().sum() + h.sum() + norms(x, *weights[1:], collect=(collect, collect))
    loss.backward()
    truth = [w.detach().clone().requires_grad_() for w in weights]
    (rms_norm(x + x, truth[0]).sin().sum() + norms(x, *truth[1:])).backward()
    found = (
        sorted(column_sums(parts), key=lambda t: -len(t)) if taken else [w.grad for w in weights]
    )
    assert all(w.grad is None for w in weights) == taken
    for w, grad in zip(truth, found, strict=True):
        torch.testing.assert_close(grad, w.grad)


def test_many_column_sums_in_a_launch(device):
    """Sizes that are no multiples of a tile, more matrices than a launch takes."""
    shapes = [(1 + 37 * i % 300, 1 + 11 * i % 40) for i in range(70)]
    matrices = [torch.randn(shape, device=device) for shape in shapes]
    for matrix, found in zip(matrices, column_sums(matrices), strict=True):
        torch.testing.assert_close(found, matrix.sum(0), rtol=1e-5, atol=1e-4)


def test_empty_inputs(device):
    w = torch.ones(16, device=device, requires_grad=True)
    x = torch.empty(2, 0, 16, device=device, requires_grad=True)
    table = torch.empty(1, 0, 16, device=device)
    outs = [
        rms_norm(x, w),
        *add_rms_norm(x, x, w),
        packed_swiglu(x),
        *qk_norm_rope(x, x, w, w, table, table),
    ]
    sum(o.sum() for o in outs).backward()
    assert not w.grad.any() and x.grad.shape == x.shape


def test_two_runs_give_the_same_bits(device):
    x, w = torch.randn(300, 96, device=device), torch.randn(96, device=device)
    runs = [run(lambda x, w: rms_norm(x, w), [x, w], [torch.ones(300, 96)], device) for _ in "ab"]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda t: rms_norm(t(2, 4), t(5)), r"weight: \(5,\) must be \[4\]"),
        (lambda t: add_rms_norm(t(2, 4), t(3, 4), t(4)), r"residual: \(3, 4\)"),
        (lambda t: swiglu(t(2, 4), t(2, 5)), r"up: \(2, 5\)"),
        (lambda t: packed_swiglu(t(2, 5)), r"gate_up: .* even"),
        (lambda t: qkv_norm_rope(t(1, 2, 7), t(2), t(2), t(1, 2, 2), t(1, 2, 2), 2), "qkv: 7"),
        (
            lambda t: qk_norm_rope(t(1, 2, 4), t(1, 2, 4), t(2), t(2), t(1, 3, 2), t(1, 2, 2)),
            r"cos: \(1, 3, 2\) must be \[1 or 1, 2, 2\]",
        ),
        (
            lambda t: qk_norm_rope(t(1, 2, 5), t(1, 2, 4), t(2), t(2), t(1, 2, 2), t(1, 2, 2)),
            r"q: \(1, 2, 5\)",
        ),
        (lambda t: linear_cross_entropy(t(2, 4), t(9, 5), torch.zeros(2)), "weight: "),
        (lambda t: linear_cross_entropy(t(2, 4), t(9, 4), torch.zeros(3)), "labels: "),
        (lambda t: linear_cross_entropy(t(2, 4), t(9, 4), torch.zeros(2), chunk=0), "chunk=0"),
    ],
)
def test_shapes_that_do_not_fit(call, named):
    with pytest.raises(ValueError, match=named):
        call(torch.ones)
