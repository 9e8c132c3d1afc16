"""Every path of the fused update gives the update; the choice among them follows the table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge import ForgeAdamW, ForgeLion
from forge.kernels import wgrad_auto
from forge.kernels.apply_rule import apply_rule_reference
from forge.kernels.target import Target
from forge.kernels.wgrad_auto import PATHS, choose_path, wgrad_update_auto
from forge.optim.rules import ADAMW


def target(n, k, device, dtype=torch.bfloat16, salt=0):
    w = torch.randn(n, k, device=device).to(dtype)
    return Target(w, [(torch.rand_like(w) * 0.1), (torch.rand_like(w) * 0.1)], salt)


def clone(t):
    return Target(t.param.clone(), [s.clone() for s in t.states], t.salt)


@pytest.mark.parametrize(
    "path", ["tiles", "scratch", pytest.param("hopper", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("tokens", [1, 129, 512])
def test_every_path_gives_the_update(path, tokens, device):
    """Mixed shapes: what the Hopper kernel does not take goes another way."""
    shapes = [(64, 256), (24, 40), (128, 512), (8, 256)]
    if device.type == "cpu":
        if path == "hopper":
            pytest.skip("runs on a Hopper GPU alone")
        shapes = shapes[:2]
    ours = [target(n, k, device, salt=256 * i) for i, (n, k) in enumerate(shapes)]
    wanted = [clone(t) for t in ours]
    dys = [torch.randn(tokens, n, device=device).bfloat16() for n, _ in shapes]
    # Rows of a wider tensor: a part of packed projections.
    xs = [torch.randn(tokens, k + 4, device=device).bfloat16()[:, :k] for _, k in shapes]
    scalars = torch.tensor([1e-4, 1e-2, 0.1, 1e-3, 1.0, 1e-8], device=device)
    seed = torch.tensor(7, dtype=torch.int32, device=device)
    wgrad_update_auto(dys, xs, ours, scalars, seed, ADAMW.update, path)
    for dy, x, mine, theirs in zip(dys, xs, ours, wanted, strict=True):
        grad = dy.float().t() @ x.float()
        if path == "scratch":
            grad = grad.bfloat16()
        apply_rule_reference(grad, theirs, scalars, seed, ADAMW.update)
        for a, b in zip((mine.param, *mine.states), (theirs.param, *theirs.states), strict=True):
            # Sums in another order: a rounding falls the other way now and then, by one unit.
            assert (a.float() - b.float()).abs().max() <= 2**-6 * b.float().abs().max()
            assert (a != b).float().mean() < 5e-3


def test_the_table_has_a_path_for_every_situation():
    for capability, situations in wgrad_auto._table().items():
        assert set(situations) == {"graph", "eager"}, capability
        for ranges in situations.values():
            limits = [limit for limit, _ in ranges]
            assert limits[-1] is None and limits[:-1] == sorted(limits[:-1])
            for _, paths in ranges:
                assert set(paths) <= set(PATHS) and paths[-1] != "hopper"


@pytest.mark.gpu
def test_the_choice_follows_tokens_capture_and_shape():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the table of a Hopper GPU")
    fits, odd = target(64, 256, "cuda"), target(64, 200, "cuda")

    def choose(t, tokens, captured):
        n, k = t.param.shape
        dy, x = (torch.empty(1, c, device="cuda").bfloat16().expand(tokens, c) for c in (n, k))
        return choose_path(dy, x, t, captured)

    for situation, captured in (("graph", True), ("eager", False)):
        ranges = wgrad_auto._table()["9.0"][situation]
        for tokens in (1, 512, 4096, 65536):
            paths = next(paths for limit, paths in ranges if limit is None or tokens <= limit)
            assert choose(fits, tokens, captured) == paths[0]
            general = next(path for path in paths if path != "hopper")
            assert choose(odd, tokens, captured) == general


def test_a_path_that_cannot_run_is_refused_before_anything_changes():
    net = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="path='fast': choose one of auto, tiles"):
        ForgeAdamW(net, path="fast")
    with pytest.raises(ValueError, match="needs a CUDA device"):
        ForgeAdamW(net, path="scratch")
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="path='fast': choose one of auto"):
        ForgeAdamW([parameter], path="fast")
    with pytest.raises(ValueError, match="no fused linear layer.*pass the model"):
        ForgeAdamW([parameter], path="scratch")
    assert type(net[0]) is nn.Linear
    ForgeAdamW(net)  # the refused optimizers have let go of the parameters


@pytest.mark.gpu
def test_hopper_is_refused_where_it_cannot_run():
    net = nn.Linear(200, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="K a multiple of 256"):
        ForgeAdamW(net, path="hopper")
    with pytest.raises(ValueError, match="two states in bf16 or int8"):
        ForgeLion(nn.Linear(256, 64, device="cuda", dtype=torch.bfloat16), path="hopper")


def test_which_dtypes_and_codes_the_hopper_kernel_takes(monkeypatch):
    """Without a GPU: as if there were one."""
    monkeypatch.setattr(wgrad_auto, "capability", lambda device: (9, 0))
    x, dy = torch.ones(4, 512).bfloat16(), torch.ones(4, 64).bfloat16()
    w = torch.zeros(64, 512, dtype=torch.bfloat16)
    codes = [torch.zeros(64, 512, dtype=t) for t in (torch.int8, torch.uint8)]
    scales = [torch.zeros(64, 4, dtype=torch.uint8) for _ in codes]
    odd = torch.zeros(257, dtype=torch.uint8)[1:].view(64, 4)
    fits = wgrad_auto._hopper
    assert fits(dy, x, target(64, 512, "cpu"))
    assert fits(dy, x, Target(w, codes, 256, scales))
    assert not fits(dy, x, Target(w, codes[::-1], 256, scales))  # the signed state comes first
    assert not fits(dy, x, Target(w, [codes[0]] * 2, 256, scales))
    assert not fits(dy, x, Target(w, codes, 256, [scales[0], odd]))
    assert not fits(dy, x, Target(w, codes[:1], 256, scales[:1]))
    assert not fits(dy, x, Target(w.float(), codes, 256, scales))
    assert not fits(dy, x, Target(w, codes, 128, scales))
