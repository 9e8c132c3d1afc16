"""Cross-entropy whose rows stay in shared memory, as gluon_on_cpu.py runs it.

On a GPU: test_logits_that_stay_on_the_chip in test_model_kernels.py.
"""

from __future__ import annotations

import types
from contextlib import nullcontext

import pytest
import torch

from .gluon_on_cpu import OnCPU

BLOCK = 64 * 128


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("programs", [1, 2, 4])
@pytest.mark.parametrize(
    ("tokens", "columns", "first"),
    [
        (2, 128, 0),
        (5, 14 * BLOCK, 0),  # as many blocks as there are slots
        (3, 14 * BLOCK + 128, 0),  # one more
        (3, 19 * BLOCK - 1024, 0),
        (5, 3 * BLOCK, 777),
        (2, 29 * BLOCK, 128),  # more than twice as many
    ],
)
def test_against_fp64(tokens, columns, first, programs, late, monkeypatch):
    module = pytest.importorskip("forge.kernels.cross_entropy_hopper")
    kernel = OnCPU(module._cross_entropy_hopper_kernel, late)
    monkeypatch.setattr(module, "_cross_entropy_hopper_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    properties = types.SimpleNamespace(multi_processor_count=programs)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    z = (3 * torch.randn(tokens, columns)).bfloat16()
    exact = z.double()
    labels = torch.randint(0, columns + first, (tokens,))
    ignored = first + 5  # an entry of the vocabulary, as a padding token's is
    labels[0], labels[1] = first + columns - 1, ignored
    valid = labels != ignored
    lse = torch.randn(tokens) if first else torch.full((tokens,), float("nan"))
    target = torch.full((tokens,), float("nan"))
    want = torch.logsumexp(exact, 1)
    if first:
        want = torch.logaddexp(want, lse.double())
    count = valid.sum().float()
    module.cross_entropy_hopper(z, labels, lse, target, count, first, ignored)
    assert kernel.launched == 1
    torch.testing.assert_close(lse.double(), want.where(valid, 0), rtol=1e-6, atol=1e-5)
    at = labels - first
    inside = (at >= 0) & (at < columns) & valid
    assert torch.equal(target[inside].double(), exact[inside, at[inside]])
    assert target[~valid].isnan().all() if first else target[~valid].count_nonzero() == 0
    hit = torch.zeros_like(exact)
    hit[inside, at[inside]] = 1
    dz = ((exact - want[:, None]).exp() - hit) / count * valid[:, None]
    torch.testing.assert_close(z.double(), dz, rtol=2**-7, atol=1e-6)
