"""Weight gradient and optimizer update, by the way that is fastest where it runs.

    dW = dY^T X;  w, states = rule(w, dW, states, scalars)

Three paths, one result up to the order of sums and the rounding of dW:

- ``tiles``: one Triton kernel for many weights (kernels/wgrad_update.py). Any GPU, dtype and shape;
  takes the host least.
- ``hopper``: everything overlaps in one Gluon kernel (kernels/wgrad_update_hopper.py). Fastest on
  the GPU for what it supports, bf16 weights with two states in bf16 or int8; takes the host most.
- ``scratch``: cuBLAS forms the gradients of a few weights in a scratch buffer of at most
  ``SCRATCH_ELEMENTS``, an element-wise kernel applies them while they are in L2. The gradient is
  rounded to the dtype of dY, as in plain torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from forge.kernels.apply_rule import apply_rule
from forge.kernels.runtime import Dual, capability
from forge.kernels.target import Target
from forge.kernels.wgrad_update import wgrad_update

PATHS = ("tiles", "scratch", "hopper")
# About one layer of Qwen3-0.6B: 32 MB in bf16, which stays in the 50 MB of an H200's L2.
SCRATCH_ELEMENTS = 2**24
TABLE = Path(__file__).with_suffix(".json")


def check_name(path: str) -> None:
    """Raise ValueError when there is no such path."""
    if path not in ("auto", *PATHS):
        raise ValueError(f"path={path!r}: choose one of auto, {', '.join(PATHS)}")


def check_path(path: str, param: Tensor, state_dtype: torch.dtype | None, states: int) -> None:
    """Raise ValueError, saying why, when ``path`` cannot update ``param`` [N, K].

    Args:
        path: ``"auto"`` or one of ``PATHS``.
        state_dtype: dtype of the parameter's states, and ``states`` their number.
    """
    check_name(path)
    if path == "auto":
        return
    if not param.is_cuda:
        raise ValueError(f"path={path!r} needs a CUDA device; use path='auto' on a CPU")
    if path == "hopper" and not _fits_hopper(param, (param.dtype, state_dtype), states):
        raise ValueError(
            "path='hopper' needs a Hopper GPU, bf16 weights [N, K] with K a multiple of 256 and N "
            "of 8, and two states in bf16 or int8; use path='auto'"
        )


def _fits_hopper(param: Tensor, dtypes: tuple[torch.dtype | None, ...], states: int) -> bool:
    return (
        dtypes in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8))
        and states == 2
        and param.shape[1] % 256 == 0
        and param.shape[0] % 8 == 0
        and capability(param.device) == (9, 0)
    )


@cache
def _table() -> dict[str, dict[str, list[tuple[int | None, list[str]]]]]:
    """By capability and situation: up to so many tokens, the paths in order of preference."""
    return json.loads(TABLE.read_text())


def choose_path(dy: Tensor, x: Tensor, target: Target, captured: bool) -> str:
    """The path for one weight, from the table ``wgrad_auto.json``.

    Its limits were set by hand from what results/LOG.md records of one H200; ``forge-bench kernels
    --write-paths`` replaces them by measured ones.

    Args:
        dy, x: [..., N] and [..., K] as given to :func:`wgrad_update_auto`.
        captured: the launch goes into a CUDA graph, where only the GPU's time counts. Otherwise
            the host's time counts as much.
    """
    tokens = x.numel() // x.shape[-1]
    for path in _preference(target.param.device, tokens, captured):
        if path != "hopper" or _hopper(dy, x, target):
            return path
    raise AssertionError(f"{TABLE.name} names no path that takes every weight")


@lru_cache
def _preference(device: torch.device, tokens: int, captured: bool) -> list[str]:
    if device.type != "cuda":
        return ["tiles"]
    major, minor = capability(device)
    table = _table()
    ranges = table.get(f"{major}.{minor}", table["other"])["graph" if captured else "eager"]
    return next(paths for limit, paths in ranges if limit is None or tokens <= limit)


def _hopper(dy: Tensor, x: Tensor, target: Target) -> bool:
    return (
        dy.dtype == x.dtype == torch.bfloat16
        and x.numel() > 0
        and target.salt % 256 == 0
        and _fits_hopper(target.param, target.dtypes, len(target.states))
        and (not target.scales or _fits_codes(target))
    )


def _fits_codes(target: Target) -> bool:
    """Whether codes are as the Hopper kernel reads them: signed and unsigned, exponents in twos."""
    return target.states[1].dtype == torch.uint8 and not any(
        s.data_ptr() % 2 for s in target.scales
    )


def wgrad_update_auto(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    targets: Sequence[Target],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
    path: str = "auto",
    captured: bool = False,
) -> None:
    """As :func:`forge.kernels.wgrad_update.wgrad_update`, by ``path``.

    A forced path that cannot take a weight leaves it to the automatic choice; ``check_path`` tells
    beforehand. ``captured`` as in :func:`choose_path`.
    """
    if path == "auto" and (alike := _same_path(xs, targets, captured)) is not None:
        _UPDATES[alike](dys, xs, targets, scalars, seed, rule)
        return
    groups: dict[tuple[str, int], list[int]] = {}
    for i, (dy, x, target) in enumerate(zip(dys, xs, targets, strict=True)):
        chosen = path
        if path == "auto" or path == "hopper" and not _hopper(dy, x, target):
            chosen = choose_path(dy, x, target, captured)
        # A launch of the Hopper kernel has one token count.
        tokens = x.numel() // x.shape[-1] if chosen == "hopper" else 0
        groups.setdefault((chosen, tokens), []).append(i)
    for (chosen, _), members in groups.items():
        _UPDATES[chosen](
            [dys[i] for i in members],
            [xs[i] for i in members],
            [targets[i] for i in members],
            scalars,
            seed,
            rule,
        )


def _same_path(xs: Sequence[Tensor], targets: Sequence[Target], captured: bool) -> str | None:
    """The path that suits all, if it takes every weight: what most eager steps are."""
    device = targets[0].param.device
    counts = {x.numel() // target.fields[3] for x, target in zip(xs, targets, strict=True)}
    paths = {_preference(device, tokens, captured)[0] for tokens in counts}
    return paths.pop() if len(paths) == 1 and "hopper" not in paths else None


def _rows(t: Tensor) -> Tensor:
    """``t`` as rows [M, C] that the tensor memory engine can read: aligned to 16 bytes."""
    t = t.reshape(-1, t.shape[-1])
    pitch = t.stride(0) * t.element_size()
    return t if t.stride(1) == 1 and not (pitch | t.data_ptr()) % 16 else t.contiguous()


def _overlapped(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    targets: Sequence[Target],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
) -> None:
    from forge.kernels.wgrad_update_hopper import wgrad_update_hopper

    dys, xs = [_rows(dy) for dy in dys], [_rows(x) for x in xs]
    wgrad_update_hopper(dys, xs, targets, scalars, seed, rule)


def _scratch(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    targets: Sequence[Target],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
) -> None:
    chunk: list[int] = []
    size = 0
    for i, target in enumerate(targets):
        numel = target.fields[1]
        if chunk and size + numel > SCRATCH_ELEMENTS:
            _scratch_chunk(chunk, dys, xs, targets, scalars, seed, rule)
            chunk, size = [], 0
        chunk.append(i)
        size += numel
    _scratch_chunk(chunk, dys, xs, targets, scalars, seed, rule)


def _scratch_chunk(
    chunk: list[int],
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    targets: Sequence[Target],
    scalars: Tensor,
    seed: Tensor | None,
    rule: Dual,
) -> None:
    like = dys[chunk[0]]
    sizes = [targets[i].fields[1] for i in chunk]
    scratch = torch.empty(sum(sizes), dtype=like.dtype, device=like.device).split(sizes)
    grads = [part.view(targets[i].param.shape) for i, part in zip(chunk, scratch, strict=True)]
    for i, grad in zip(chunk, grads, strict=True):
        dy, x = dys[i], xs[i]
        torch.mm(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]), out=grad)
    apply_rule(grads, [targets[i] for i in chunk], scalars, seed, rule)


_UPDATES = {"tiles": wgrad_update, "scratch": _scratch, "hopper": _overlapped}
