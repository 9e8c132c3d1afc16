"""Products for Hopper against exact ones of the same bf16 numbers, on a GPU and without.

On a CPU gluon_on_cpu.py runs the kernel.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from forge.kernels.linear_auto import BACKWARD, FORWARD, TOKENS, Tile

from .gluon_on_cpu import OnCPU

FORMS = [("y", s) for s in FORWARD] + [("dx", s) for s in BACKWARD]


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    from forge.kernels import linear_hopper

    return linear_hopper


def product(hopper, form, a, w, **options):
    function = hopper.linear_hopper if form == "y" else hopper.linear_hopper_dx
    return function(a, w, **options)


def wanted(form, a, w):
    return a.double() @ (w.double().t() if form == "y" else w.double())


def close(got, want, parts):
    """The last bit of bf16; that of each part, up to four times the root mean square; fp32 sums."""
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    scale = want.square().mean().sqrt()
    error = (got.double() - want).abs()
    assert (error <= 2**-8 * want.abs() + 2**-6 * scale * (parts > 1) + 1e-4 * scale).all()


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(
    ("form", "shape", "tokens", "tile"),
    [
        ("y", (128, 64), 128, Tile(128, 5)),  # one step
        ("y", (136, 520), 1, Tile(128, 5)),  # two turns of the ring; ragged in all dimensions
        ("y", (64, 1032), 130, Tile(128, 6, parts=4)),
        ("y", (64, 72), 9, Tile(64, 4, parts=3)),  # a part without terms
        ("dx", (520, 136), 130, Tile(128, 5, parts=4)),
        ("dx", (264, 72), 33, Tile(64, 4, terms=128)),
    ],
)
def test_on_the_cpu(form, shape, tokens, tile, prefetch, late, monkeypatch):
    module = pytest.importorskip("forge.kernels.linear_hopper")
    kernel = OnCPU(module._linear_hopper_kernel, late)
    monkeypatch.setattr(module, "_linear_hopper_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    width = shape[1] if form == "y" else shape[0]
    a = torch.randn(tokens, width + 8).bfloat16()[:, :width]
    w = (torch.randn(shape) * width**-0.5).bfloat16()
    got = module.launch(a, w, form == "dx", tile, prefetch)
    assert kernel.launched == 1 and got.shape[0] == tile.parts and got.isfinite().all()
    close(got.float().sum(0).bfloat16(), wanted(form, a, w), tile.parts)


def operands(form, shape, tokens, pad=0):
    """Random operands; a row of x is followed by ``pad`` numbers that are not its own."""
    width = shape[1] if form == "y" else shape[0]
    a = torch.randn(tokens, width + pad, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * width**-0.5
    torch.cuda.synchronize()  # w may be prefetched
    return a[:, :width], w


def test_what_the_tables_hold_fits():
    for tiles in (FORWARD, BACKWARD):
        for (n, k), tile in tiles.items():
            width, terms = (n, k) if tiles is FORWARD else (k, n)
            assert width % tile.columns == 0 and terms % (tile.terms * tile.parts) == 0
            # All programs for 512 tokens run at once; the result lies in the ring's first slots.
            assert 4 * width // tile.columns * tile.parts <= 132
            assert tile.columns <= tile.slots * tile.terms
            bytes = tile.slots * tile.terms * (TOKENS + tile.columns) * 2
            assert bytes <= 227 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "shape"), FORMS)
@pytest.mark.parametrize("tokens", [1, 33, 127, 512, 700])
@pytest.mark.parametrize("prefetch", [False, True])
def test_products(form, shape, tokens, prefetch, hopper):
    """Those of the tables."""
    tile = (FORWARD if form == "y" else BACKWARD)[shape]
    a, w = operands(form, shape, tokens, pad=8 * (tokens % 3))
    got = product(hopper, form, a, w, prefetch=prefetch)
    close(got, wanted(form, a, w), tile.parts)
    parts = product(hopper, form, a, w, parts=True, prefetch=prefetch)
    assert torch.equal(parts.sum(0), got)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["y", "dx"])
@pytest.mark.parametrize("shape", [(8, 8), (1000, 520), (72, 136), (264, 1032)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("columns", [64, 128])
def test_ragged_widths(form, shape, parts, columns, hopper):
    """Terms and columns that fill neither slots nor tiles; parts of fewer terms, and of none."""
    tile = Tile(columns, 4, parts)
    a, w = operands(form, shape, 200, pad=8)
    got = hopper.launch(a, w, form == "dx", tile, True)
    assert got.shape[0] == parts and got.isfinite().all()
    close(got.float().sum(0).bfloat16(), wanted(form, a, w), parts)
    # A part stores zeros where it has no term.
    assert parts == 1 or (a.shape[1] > 128) == bool(got[2].count_nonzero())


@pytest.mark.gpu
def test_reads_what_the_kernel_in_front_writes(hopper):
    """Without ``prefetch`` the weight too."""
    from forge.kernels.rms_norm import rms_norm

    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    source = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        w = rms_norm(source, ones, 1e-6)
        got = hopper.linear_hopper(x, w)
        close(got, wanted("y", x, w), 1)
        y = rms_norm(x, ones, 1e-6)
        got = hopper.linear_hopper(y, w, prefetch=True)
        close(got, wanted("y", y, w), 1)
        x = y + torch.randn_like(y)


@pytest.mark.gpu
def test_leading_dimensions_and_no_tokens(hopper):
    w = torch.randn(24, 16, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 3, 16, device="cuda", dtype=torch.bfloat16)
    assert hopper.linear_hopper(x, w).shape == (2, 3, 24)
    assert hopper.linear_hopper(x[0, 0], w).shape == (24,)
    assert hopper.linear_hopper(x[:0], w).shape == (0, 3, 24)
    assert hopper.linear_hopper_dx(hopper.linear_hopper(x, w), w).shape == x.shape


@pytest.mark.gpu
def test_bad_inputs_are_named(hopper):
    w = torch.randn(24, 16, device="cuda", dtype=torch.bfloat16)
    x, dy = w.new_zeros(2, 16), w.new_zeros(2, 24)
    for function, a, weight, message in (
        (hopper.linear_hopper, dy, w, r"x: \(2, 24\) .* weight's second"),
        (hopper.linear_hopper_dx, x, w, r"dy: \(2, 16\) .* weight's first"),
        (hopper.linear_hopper, x.float(), w, r"x: is torch.float32"),
        (hopper.linear_hopper, x, w.half(), r"weight: is torch.float16"),
        (hopper.linear_hopper, x, w.cpu(), r"weight: is torch.bfloat16 on cpu"),
        (hopper.linear_hopper, x, w.t().contiguous().t(), r"pass weight.contiguous\(\)"),
        (hopper.linear_hopper, x, w[:20], "multiples of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            function(a, weight)
