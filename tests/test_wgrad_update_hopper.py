"""The Hopper kernel against the torch reference, whose random bits it shares."""

from __future__ import annotations

import pytest
import torch

from forge.kernels.apply_rule import apply_rule
from forge.kernels.block_code import decode_reference, encode_reference, scale_shape
from forge.kernels.target import BLOCK, Target
from forge.kernels.wgrad_auto import wgrad_update_auto
from forge.kernels.wgrad_update import wgrad_update_reference
from forge.optim.rules import ADAMW, NADAM, RADAM

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def target(shape, salt):
    w = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    m = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.1
    v = torch.rand(shape, device="cuda", dtype=torch.bfloat16) * 0.1
    return Target(w, [m, v], salt)


def clone(t):
    return Target(t.param.clone(), [s.clone() for s in t.states], t.salt)


LAYOUTS = ["wide", "pair", "apart"]  # the last one with codes
bf16_layouts = pytest.mark.parametrize("layout", LAYOUTS[:2])
all_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@bf16_layouts
@pytest.mark.parametrize("rule", [ADAMW, NADAM, RADAM], ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [1, 63, 64, 129, 512])
@pytest.mark.parametrize(
    "shapes",
    [[(2048, 1024), (1024, 1024), (1024, 2048), (3072, 1024)], [(1000, 512), (8, 256), (136, 768)]],
)
@pytest.mark.parametrize("stochastic", [True, False])
def test_same_bits_as_the_reference(rule, tokens, shapes, stochastic, layout):
    from forge.kernels.wgrad_update_hopper import wgrad_update_hopper

    ours = [target(shape, 256 * (i + 5)) for i, shape in enumerate(shapes)]
    wanted = [clone(t) for t in ours]
    dys = [torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n, _ in shapes]
    xs = [torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16) for _, k in shapes]
    scalars = torch.linspace(1e-3, 2e-3, rule.scalar_count, device="cuda")
    seed = torch.tensor(-123456, dtype=torch.int32, device="cuda") if stochastic else None
    wgrad_update_hopper(dys, xs, ours, scalars, seed, rule.update, layout)
    for dy, x, mine, theirs in zip(dys, xs, ours, wanted, strict=True):
        wgrad_update_reference(dy, x, theirs, scalars, seed, rule.update)
        pairs = zip((mine.param, *mine.states), (theirs.param, *theirs.states), strict=True)
        for a, b in pairs:
            # Sums in another order: a rounding falls the other way now and then, by one unit.
            assert (a != b).float().mean() < 5e-3
            assert (a.float() - b.float()).abs().max() <= 2**-6 * b.float().abs().max()


def coded(shape, salt):
    """A target with codes of states whose blocks' largest values lie far apart."""
    w = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    codes, scales = [], []
    for dtype in (torch.int8, torch.uint8):
        code = torch.empty(shape, device="cuda", dtype=dtype)
        scale = torch.empty(scale_shape(code), device="cuda", dtype=torch.uint8)
        blocks = torch.randint(-12, 2, scale.shape, device="cuda").float().exp2()
        x = torch.randn(shape, device="cuda") * blocks.repeat_interleave(BLOCK, 1)
        x[0] = 0.0  # as new states are
        encode_reference(x if dtype == torch.int8 else x * x, code, scale, None)
        codes.append(code)
        scales.append(scale)
    return Target(w, codes, salt, scales)


def clone_coded(t):
    return Target(
        t.param.clone(), [s.clone() for s in t.states], t.salt, [s.clone() for s in t.scales]
    )


def compare_coded(mine, theirs, where):
    """The same but where a sum in another order falls to the other side of a rounding."""
    a, b = mine.param, theirs.param
    assert (a != b).float().mean() < 5e-3, where
    assert (a.float() - b.float()).abs().max() <= 2**-6 * b.float().abs().max(), where
    for j, (code, other) in enumerate(zip(mine.states, theirs.states, strict=True)):
        scale, scale2 = mine.scales[j], theirs.scales[j]
        apart = (scale.int() - scale2.int()).abs()
        assert apart.max() <= 1 and (apart != 0).float().mean() < 5e-3, (where, j)
        same = (apart == 0).repeat_interleave(BLOCK, 1)
        far = (code.int() - other.int()).abs()[same]
        # A gradient next to zero may differ in any of its digits; what counts is its block.
        assert (far != 0).float().mean() < 2e-2, (where, j, (far != 0).float().mean())
        x, y = (decode_reference(c, s) for c, s in ((code, scale), (other, scale2)))
        largest = y.abs().unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, 1)
        assert ((x - y).abs() <= 2**-3 * y.abs() + 2**-6 * largest).all(), (where, j)


# In the last, rows of several tiles that are not full, and more matrices than a launch takes.
CODED_SHAPES = [
    [(2048, 1024), (1024, 2048), (3072, 1024)],
    [(1000, 512), (8, 256), (136, 768), (128, 256), (264, 1024), (24, 256)],
]


@all_layouts
@pytest.mark.parametrize("rule", [ADAMW, NADAM], ids=lambda r: r.name)
@pytest.mark.parametrize("tokens", [1, 129, 512, 4096])
@pytest.mark.parametrize("shapes", CODED_SHAPES)
def test_codes_as_apply_rule_writes_them(rule, tokens, shapes, layout):
    from forge.kernels.wgrad_update_hopper import wgrad_update_hopper

    ours = [coded(shape, 256 * (i + 5)) for i, shape in enumerate(shapes)]
    wanted = [clone_coded(t) for t in ours]
    dys = [torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n, _ in shapes]
    xs = [torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16) for _, k in shapes]
    scalars = torch.linspace(1e-3, 2e-3, rule.scalar_count, device="cuda")
    seed = torch.tensor(-123456, dtype=torch.int32, device="cuda")
    grads = [dy.float().t() @ x.float() for dy, x in zip(dys, xs, strict=True)]
    for _ in range(2):
        wgrad_update_hopper(dys, xs, ours, scalars, seed, rule.update, layout)
        apply_rule(grads, wanted, scalars, seed, rule.update)
        for i, (mine, theirs) in enumerate(zip(ours, wanted, strict=True)):
            compare_coded(mine, theirs, (i, shapes[i]))
            for part, other in zip(
                (mine.param, *mine.states, *mine.scales),
                (theirs.param, *theirs.states, *theirs.scales),
                strict=True,
            ):
                part.copy_(other)


@all_layouts
def test_an_exact_gradient_gives_the_same_bits(layout):
    """Small whole numbers: sums are exact in any order, so nothing may differ."""
    from forge.kernels.wgrad_update_hopper import wgrad_update_hopper

    shapes = [(136, 512), (256, 256), (8, 768)]
    ours = [coded(shape, 256 * (i + 5)) for i, shape in enumerate(shapes)]
    wanted = [clone_coded(t) for t in ours]
    dys = [torch.randint(-4, 5, (129, n), device="cuda").bfloat16() for n, _ in shapes]
    xs = [torch.randint(-4, 5, (129, k), device="cuda").bfloat16() for _, k in shapes]
    scalars = torch.tensor([1e-4, 1e-2, 0.1, 1e-3, 1.0, 1e-8], device="cuda")
    seed = torch.tensor(77, dtype=torch.int32, device="cuda")
    wgrad_update_hopper(dys, xs, ours, scalars, seed, ADAMW.update, layout)
    grads = [dy.float().t() @ x.float() for dy, x in zip(dys, xs, strict=True)]
    apply_rule(grads, wanted, scalars, seed, ADAMW.update)
    for mine, theirs in zip(ours, wanted, strict=True):
        # The weights' root and quotient are approximate; the states have neither. A product may be
        # rounded before a sum in one kernel and not in the other.
        for j in range(2):
            assert (mine.scales[j] != theirs.scales[j]).float().mean() < 1e-3
            assert (mine.states[j] != theirs.states[j]).float().mean() < 1e-3
        assert (mine.param != theirs.param).float().mean() < 1e-3


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("make", [target, coded], ids=["bf16", "int8"])
@pytest.mark.parametrize("tokens", [1, 33, 129, 512])
def test_every_layout_gives_the_same_bits(tokens, make, stochastic):
    """Two updates with whole-number operands, whose sums are exact in any order."""
    from forge.kernels.wgrad_update_hopper import wgrad_update_hopper

    # Ragged heights, more matrices than a launch takes, more tiles than programs.
    shapes = [(1000, 512), (8, 256), (136, 768), (4096, 1024), (264, 3072)]
    start = [make(shape, 256 * (i + 5)) for i, shape in enumerate(shapes)]
    dys = [torch.randint(-4, 5, (tokens, n), device="cuda").bfloat16() for n, _ in shapes]
    xs = [torch.randint(-4, 5, (tokens, k), device="cuda").bfloat16() for _, k in shapes]
    scalars = torch.tensor([1e-4, 1e-2, 0.1, 1e-3, 1.0, 1e-8], device="cuda")
    seed = torch.tensor(77, dtype=torch.int32, device="cuda") if stochastic else None
    results = {}
    layouts = LAYOUTS if start[0].scales else LAYOUTS[:2]
    for layout in layouts:
        ours = [clone_coded(t) for t in start]
        for _ in range(2):
            wgrad_update_hopper(dys, xs, ours, scalars, seed, ADAMW.update, layout)
        results[layout] = [(t.param, *t.states, *t.scales) for t in ours]
    for before, wide in zip(start, results["wide"], strict=True):
        assert not torch.equal(before.states[0], wide[1])  # something was done
    for layout in layouts[1:]:
        for i, shape in enumerate(shapes):
            for a, b in zip(results[layout][i], results["wide"][i], strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (layout, shape)


def test_an_unknown_layout_is_named():
    from forge.kernels.wgrad_update_hopper import wgrad_update_hopper

    t = target((8, 256), 0)
    dy, x = (torch.zeros(1, n, device="cuda", dtype=torch.bfloat16) for n in (8, 256))
    scalars = torch.zeros(ADAMW.scalar_count, device="cuda")
    with pytest.raises(ValueError, match="layout: is 'tall', must be one of wide, pair or None"):
        wgrad_update_hopper([dy], [x], [t], scalars, None, ADAMW.update, "tall")
    with pytest.raises(ValueError, match="layout: is 'apart'"):
        wgrad_update_hopper([dy], [x], [t], scalars, None, ADAMW.update, "apart")


@all_layouts
def test_a_nan_turns_its_block_into_nan(layout):
    from forge.kernels.wgrad_update_hopper import wgrad_update_hopper

    t = coded((256, 512), 0)
    dy = torch.zeros(64, 256, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(64, 512, device="cuda", dtype=torch.bfloat16)
    dy[:, 9] = 1.0
    x[0, 300] = float("nan")
    scalars = torch.tensor([1e-4, 1e-2, 0.1, 1e-3, 1.0, 1e-8], device="cuda")
    seed = torch.tensor(77, dtype=torch.int32, device="cuda")
    wgrad_update_hopper([dy], [x], [t], scalars, seed, ADAMW.update, layout)
    # Zero times NaN: every row sees it, in column 300.
    for code, scale in zip(t.states, t.scales, strict=True):
        values = decode_reference(code, scale)
        assert values[:, 256:384].isnan().all()
        assert values[:, :256].isfinite().all() and values[:, 384:].isfinite().all()
    assert t.param[:, 300].isnan().all()


def test_the_automatic_path_of_a_captured_step_takes_codes():
    from forge.kernels.wgrad_auto import choose_path

    t = coded((256, 512), 0)
    dy = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    assert choose_path(dy, x, t, captured=True) == "hopper"
    turned = Target(t.param, t.states[::-1], 0, t.scales[::-1])
    assert choose_path(dy, x, turned, captured=True) == "scratch"
    wanted = clone_coded(t)
    scalars = torch.tensor([1e-4, 1e-2, 0.1, 1e-3, 1.0, 1e-8], device="cuda")
    seed = torch.tensor(77, dtype=torch.int32, device="cuda")
    wgrad_update_auto([dy], [x], [t], scalars, seed, ADAMW.update, captured=True)
    apply_rule([dy.float().t() @ x.float()], [wanted], scalars, seed, ADAMW.update)
    compare_coded(t, wanted, "auto")
