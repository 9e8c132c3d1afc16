"""The update of a weight from products and rows, in slices, and from the gradient."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge.kernels import rows_apart, sort_ids, wgrad_auto
from forge.kernels.apply_rule import apply_rule
from forge.kernels.block_code import scale_shape
from forge.kernels.row_update import Rows, add_product, row_update
from forge.kernels.rows_apart import RowsApart
from forge.kernels.target import Target
from forge.optim.rules import ADAMW

V, C = 53, 24
SCALARS = [1e-2, 1e-2, 0.1, 1e-3, 1.0, 1e-8]


@pytest.fixture(autouse=True)
def _slices_of_16_rows(monkeypatch):
    monkeypatch.setattr(wgrad_auto, "SCRATCH_ELEMENTS", 16 * C)


def make_target(device, dtype=torch.float32, states="same", columns=C, salt=2**31 - 512):
    w = torch.randn(V, columns).to(device, dtype)
    if states == "int8":
        codes = [
            torch.randint(0, 100, w.shape, dtype=kind).to(device)
            for kind in (torch.int8, torch.uint8)
        ]
        scales = [torch.full(scale_shape(c), 120, dtype=torch.uint8, device=device) for c in codes]
        return Target(w, codes, salt, scales)
    return Target(w, [torch.randn_like(w) * 0.1, torch.rand_like(w) * 0.1], salt)


def clone(t):
    return Target(
        t.param.clone(), [s.clone() for s in t.states], t.salt, [s.clone() for s in t.scales]
    )


def stored(t):
    return (t.param, *t.states, *t.scales)


def scalars(device):
    return torch.tensor(SCALARS, device=device)


def whole_numbers(*shape, device, dtype):
    """Sums of their products are exact in every order and dtype, as long as they stay small."""
    return torch.randint(-1, 2, shape).to(device, dtype)


def repeated_ids(device, dtype=torch.int64):
    """Once, a few times, 8 and 16 times (whole blocks of the kernel), 19 times, and left out."""
    ids = [0, 52, 15, 16, 16, 31, -1, -1] + [7] * 8 + [33] * 16 + [47] * 19
    return torch.tensor(ids, dtype=dtype, device=device)[torch.randperm(len(ids))].view(3, -1)


def dense(ids, rows):
    grad = torch.zeros(V, rows.shape[-1], dtype=torch.float64)
    kept = ids.flatten().cpu() >= 0
    grad.index_add_(0, ids.flatten().cpu()[kept].long(), rows.flatten(0, -2).cpu().double()[kept])
    return grad


@pytest.mark.parametrize("what", ["head and rows", "rows", "two of each", "head", "no tokens"])
@pytest.mark.parametrize(
    ("dtype", "states"),
    [(torch.float32, "same"), (torch.bfloat16, "same"), (torch.bfloat16, "int8")],
)
def test_stores_the_bits_that_the_whole_gradient_gives(device, what, dtype, states):
    ids = repeated_ids(device)
    make = dict(device=device, dtype=dtype)
    heads = [
        (whole_numbers(3, 5, V, **make), whole_numbers(3, 5, C, **make)),
        (whole_numbers(2, V + 3, **make)[:, :V], whole_numbers(2, 2 * C, **make)[:, ::2]),
    ]
    embeddings = [
        (ids, whole_numbers(*ids.shape, C, **make)),
        (ids.int()[0], whole_numbers(1, C, **make).expand(ids.shape[1], C)),
    ]
    parts = {
        "head and rows": heads[:1] + embeddings[:1],
        "rows": embeddings[:1],
        "two of each": [embeddings[0], *heads, embeddings[1]],
        "head": heads[:1],
        "no tokens": [(heads[0][0][:0], heads[0][1][:0]), (ids[:0], embeddings[0][1][:0])],
    }[what]
    grad = torch.zeros(V, C, dtype=torch.float64)
    for dy, x in parts:
        if dy.is_floating_point():
            grad += dy.flatten(0, -2).cpu().double().t() @ x.flatten(0, -2).cpu().double()
        else:
            grad += dense(dy, x)
    ours = make_target(device, dtype, states)
    wanted = clone(ours)
    seed = torch.tensor(7, dtype=torch.int32, device=device)
    row_update(*zip(*parts, strict=True), ours, scalars(device), seed, ADAMW.update)
    apply_rule([grad.to(device, dtype)], [wanted], scalars(device), seed, ADAMW.update)
    for a, b in zip(stored(ours), stored(wanted), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("counted", [sort_ids.COUNTED, 0], ids=["counted", "sorted"])
@pytest.mark.parametrize("columns", [C, 300, 1100])
@pytest.mark.parametrize(
    ("dtype", "states"),
    [(torch.float32, "same"), (torch.bfloat16, "same"), (torch.bfloat16, "int8")],
)
def test_rows_apart_store_the_bits_of_one_update(
    device, dtype, states, columns, counted, slices, monkeypatch
):
    """The whole from the product first, the looked-up rows once more when theirs is known."""
    monkeypatch.setattr(sort_ids, "COUNTED", counted)
    monkeypatch.setattr(wgrad_auto, "SCRATCH_ELEMENTS", 32 * columns)
    if device.type == "cpu":  # the interpreter takes as long for a program of few elements
        monkeypatch.setattr("forge.kernels.apply_rule._ELEMENTS", 2**14)
    ids = repeated_ids(device)
    make = dict(device=device, dtype=dtype)
    tokens = ids.numel() + (slices - 2)  # of the head: fewer or more than are looked up
    dy = whole_numbers(tokens, V, **make)
    x, rows = (whole_numbers(*shape, columns, **make) for shape in ([tokens], ids.shape))
    ours = make_target(device, dtype, states, columns)
    wanted = clone(ours)
    seed = torch.tensor(7, dtype=torch.int32, device=device)
    arguments = (scalars(device), seed, ADAMW.update)
    apart = RowsApart(ids, ours)
    size = -(-V // slices)
    for end in range(V, 0, -size):
        first = max(0, end - size)
        part = dy[:, first:end].clone()
        apart.keep(x, part, first)
        row_update([part], [x], ours.rows(first, end), *arguments)
    apart.update(rows, *arguments)
    row_update([dy, ids], [x, rows], wanted, *arguments)
    for a, b in zip(stored(ours), stored(wanted), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [0, 1, 2, 16, 511, 1030])
def test_ids_sorted_by_counting(device, dtype, count):
    """As a stable sort; values of all sizes, most of them more than once."""
    info = torch.iinfo(dtype)
    edges = torch.tensor([info.min, -1, 0, 1, info.max], dtype=dtype)
    ids = torch.randint(-3, 20, (count,), dtype=dtype)
    ids[::3] = edges[torch.randint(5, ids[::3].shape)]
    for given in (ids, ids.repeat_interleave(2)[::2]):  # the second is strided
        for found, wanted in zip(
            sort_ids.sort_ids(given.to(device)), torch.sort(ids, stable=True), strict=True
        ):
            assert found.dtype == wanted.dtype and torch.equal(found.cpu(), wanted)


def test_many_ids_are_left_to_torch(device, monkeypatch):
    monkeypatch.setattr(sort_ids, "COUNTED", 9)
    monkeypatch.setattr(sort_ids, "_sort_ids_kernel", None)
    ids = torch.arange(10, device=device).flip(0)
    assert sort_ids.sort_ids(ids)[1].tolist() == list(range(9, -1, -1))


def test_rows_are_kept_by_one_kernel_and_a_product(interpreter, monkeypatch):
    """Eleven small kernels once: a sort, which is several, and a gather of each tensor."""
    ran = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    target, ids = make_target("cpu", torch.bfloat16, "int8"), torch.randint(V, (12,))
    dy, x = torch.randn(12, V).bfloat16(), torch.randn(12, C).bfloat16()
    launch, launches = rows_apart._keep_rows_kernel.run, []
    monkeypatch.setattr(
        rows_apart._keep_rows_kernel,
        "run",
        lambda *a, **k: launches.append(None) or launch(*a, **k),
        raising=False,
    )
    with Names():
        RowsApart(ids, target).keep(x, dy)
    work = [n for n in ran if n not in ("empty", "empty_like", "new_empty", "view", "t", "detach")]
    assert "mm" in work and not {"sort", "index_select", "clamp", "gather"} & set(work)
    assert len(launches) == 1


@pytest.mark.parametrize("columns", [1, 17, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_follow_the_truth(device, dtype, columns):
    """fp32 sums, rounded once; bf16 to within a unit in the last place (the interpreter cuts)."""
    ids = repeated_ids(device)
    rows = torch.randn(*ids.shape, columns).to(device, dtype)
    grad = torch.randn(20, columns).to(device, dtype)
    exact = grad.cpu().double() + dense(ids, rows)[30:50]
    again = grad.clone()
    Rows(ids, rows).add_to(grad, 30)
    unit = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    assert ((grad.cpu().double() - exact).abs() <= unit * exact.abs() + 1e-5).all()
    Rows(ids, rows).add_to(again, 30)
    assert torch.equal(grad, again)
    # Those of other slices, and of ids that do not count, have not moved anything.
    untouched = [i for i in range(20) if i + 30 not in ids]
    assert torch.equal(exact[untouched], grad.cpu().double()[untouched])


def test_products_in_fp32_beside_bf16(device):
    dy, x = torch.randn(9, V).bfloat16().to(device), torch.randn(9, C).bfloat16().to(device)
    exact = dy.double().cpu().t() @ x.double().cpu()
    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.full((V, C), float("nan"), dtype=dtype, device=device)
        add_product(grad, dy, x, beta=0)
        add_product(grad, dy, x)
        error = (grad.double().cpu() - 2 * exact).abs()
        assert (error <= 2.0**-7 * exact.abs() + 2.0**-8 * exact.abs().max()).all()


def test_mixed_dtypes_keep_fp32_rows(device):
    """Autocast: a bf16 head, an fp32 embedding."""
    ids = repeated_ids(device)
    rows = torch.randn(*ids.shape, C).to(device)
    dy = torch.zeros(4, V, device=device).bfloat16()
    target = make_target(device)
    wanted = clone(target)
    x = torch.randn(4, C, device=device).bfloat16()
    row_update([dy, ids], [x, rows], target, scalars(device), None, ADAMW.update)
    grad = dense(ids, rows).float().to(device)
    apply_rule([grad], [wanted], scalars(device), None, ADAMW.update)
    torch.testing.assert_close(target.param, wanted.param, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.states[0], wanted.states[0], rtol=1e-5, atol=1e-6)


def test_the_scratch_is_a_slice(device):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.mm.default):
                self.numel = max(self.numel, out.numel())
            return out

    ids = repeated_ids(device)
    rows = torch.randn(*ids.shape, C).to(device)
    dy, x = torch.randn(4, V, device=device), torch.randn(4, C, device=device)
    with Largest() as largest:
        row_update([dy, ids], [x, rows], make_target(device), scalars(device), None, ADAMW.update)
    assert 0 < largest.numel <= 16 * C
