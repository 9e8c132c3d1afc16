"""What ``forge-bench kernels`` measures: the table of the model's operations, one entry each.

An entry says which functions of ``forge.kernels`` it stands for, its inputs at the shapes of a
model, the same operation in plain torch and in Liger, its fp64 truth, and what it must at least
move and compute. The fused update has cases of its own, in ``harness/update_cases.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.harness.shapes import Shape
from forge.harness.torch_qwen3 import rotate
from forge.kernels.attention import attention, attention_reference
from forge.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from forge.kernels.qk_norm_rope import norm_rope_reference, qk_norm_rope
from forge.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from forge.kernels.swiglu import swiglu, swiglu_reference

EPS = 1e-6
BF16 = 2  # bytes
# Every call of a sample has inputs of its own, of at least so many bytes in all: five times the L2
# of an H200. A few MB would stay in L2 from call to call, and take less than the floor.
COLD_BYTES = 2**28
# A relative error may exceed that of plain torch in bf16 by so much, for sums in another order; as
# in tests/test_model_kernels.py.
TOLERANCE = 1e-3


class Run(Protocol):
    """One provider's way to do a piece of work.

    Attributes:
        calls: how often calling it does the work.
    """

    calls: int

    def __call__(self) -> Any:
        """Do the work, on the current stream. What it returns must be kept as long as a graph."""

    def reset(self) -> None:
        """Put back the initial values of what the work overwrites and the gate looks at."""

    def results(self, kept: Any) -> list[Tensor]:
        """What the gate compares, after the first call since :meth:`reset` has returned ``kept``"""

    def capturing(self) -> AbstractContextManager[None]:
        """Context around a capture in a CUDA graph and its warm-up."""


@dataclass(frozen=True)
class Work:
    """What the providers of a case do at one number of tokens.

    Attributes:
        bytes, flops: what it must at least move to or from memory and compute.
        exact: fp64 truth of the results.
        errors: relative error of each result in plain torch, in the same dtype.
        run: by the name of a provider.
        errors_of: of a provider that rounds more often than plain torch: in torch that does, too.

    ``run`` raises ValueError or ImportError, saying why, for a provider that cannot do it here.
    """

    bytes: float
    flops: float
    exact: Sequence[Tensor]
    errors: Sequence[float]
    run: Callable[[str], Run]
    errors_of: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A group of rows that are compared, at each number of tokens.

    Attributes:
        tokens: numbers of tokens that are measured by default.
        providers: who can do it.
        prepare: the work at a number of tokens, on a device.
    """

    op: str
    name: str
    tokens: tuple[int, ...]
    providers: tuple[str, ...]
    prepare: Callable[[int, torch.device], Work]


def relative_error(found: Tensor, exact: Tensor) -> float:
    """``|found - exact| / |exact|``, Euclidean norms over the whole tensor."""
    scale = exact.norm().clamp(min=1e-30)
    return ((found.to(exact.device, torch.float64) - exact).norm() / scale).item()


Inputs = tuple[Sequence[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Op:
    """One operation of the model.

    All functions take the inputs in their order and return a tensor or a tuple of tensors.

    Attributes:
        name: what ``--op`` calls it.
        functions: the public functions of ``forge.kernels`` whose kernels it runs.
        inputs: ``(shape, tokens)`` to the bf16 inputs that get a gradient, and those that do not.
        ours, plain: by this package, and in plain torch.
        exact: the reference, on fp64 inputs.
        liger: ``None`` where Liger has none that can be measured.
        like_liger: what it computes, in plain torch, if it rounds more often than ``plain``.
        elements: read and written by the forward and by the backward pass, ``(shape, tokens)``:
            each operand once.
        flops: likewise, of matrix products.
    """

    name: str
    functions: tuple[str, ...]
    inputs: Callable[[Shape, int], Inputs]
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    exact: Callable[..., Any]
    liger: Callable[..., Any] | None
    elements: Callable[[Shape, int], tuple[float, float]]
    flops: Callable[[Shape, int], tuple[float, float]] = lambda shape, tokens: (0.0, 0.0)
    like_liger: Callable[..., Any] | None = None


def random(*size: int) -> Tensor:
    """Normally distributed, bf16."""
    return torch.randn(size).bfloat16()


def gain(size: int) -> Tensor:
    """Weights of a norm, bf16, of about 1."""
    return (1 + 0.1 * torch.randn(size)).bfloat16()


def _rotation(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, D], as Qwen3's."""
    frequencies = 1e6 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(tokens).float(), frequencies).repeat(1, 2)[None]
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, EPS), h


def _model_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers and Liger: rounded in front of the weight, too."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _model_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return _model_rms_norm(h, weight), h


def _by_heads(norm: Callable[..., Tensor], rope: Callable[..., Any]) -> Callable[..., Any]:
    """Norms of the heads of q and k by ``norm``, then the rotation of both by ``rope``."""

    def apply(q, k, q_weight, k_weight, cos, sin):
        heads = (t.unflatten(-1, (-1, w.shape[0])) for t, w in ((q, q_weight), (k, k_weight)))
        q, k = map(norm, heads, (q_weight, k_weight))
        return rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    return apply


def _heads(shape: Shape, tokens: int) -> tuple[Tensor, ...]:
    """q, k and v [1, heads, T, D], in memory [1, T, heads, D]."""
    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    return tuple(random(1, tokens, n, shape.head_dim).transpose(1, 2) for n in counts)


def _liger(name: str) -> Any:
    from liger_kernel.transformers import functional

    return getattr(functional, name)


OPS = (
    Op(
        name="rms_norm",
        functions=("rms_norm",),
        inputs=lambda s, t: ((random(t, s.hidden), gain(s.hidden)), ()),
        ours=lambda x, w: rms_norm(x, w, EPS),
        plain=lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        exact=lambda x, w: rms_norm_reference(x, w, EPS)[0],
        liger=lambda x, w: _liger("liger_rms_norm")(x, w, EPS),
        elements=lambda s, t: (2 * t * s.hidden, 3 * t * s.hidden),
        like_liger=_model_rms_norm,
    ),
    Op(
        name="add_rms_norm",
        functions=("add_rms_norm",),
        inputs=lambda s, t: ((random(t, s.hidden), random(t, s.hidden), gain(s.hidden)), ()),
        ours=lambda x, r, w: add_rms_norm(x, r, w, EPS),
        plain=_plain_add_rms_norm,
        exact=lambda x, r, w: rms_norm_reference(x, w, EPS, r),
        liger=lambda x, r, w: _liger("liger_fused_add_rms_norm")(x, r, w, EPS),
        # One gradient serves both terms of the sum.
        elements=lambda s, t: (4 * t * s.hidden, 4 * t * s.hidden),
        like_liger=_model_add_rms_norm,
    ),
    Op(
        name="qk_norm_rope",
        functions=("qk_norm_rope", "qkv_norm_rope"),
        inputs=lambda s, t: (
            (random(1, t, s.q_width), random(1, t, s.kv_width), *map(gain, [s.head_dim] * 2)),
            _rotation(t, s.head_dim),
        ),
        ours=lambda q, k, wq, wk, cos, sin: qk_norm_rope(q, k, wq, wk, cos, sin, EPS),
        plain=_by_heads(
            lambda x, w: F.rms_norm(x, w.shape, w, EPS),
            lambda q, k, cos, sin: (
                rotate(q, cos[:, None], sin[:, None]),
                rotate(k, cos[:, None], sin[:, None]),
            ),
        ),
        exact=lambda q, k, wq, wk, cos, sin: (
            norm_rope_reference(q, wq, cos, sin, EPS),
            norm_rope_reference(k, wk, cos, sin, EPS),
        ),
        liger=_by_heads(
            lambda x, w: _liger("liger_rms_norm")(x, w, EPS),
            lambda *arguments: _liger("liger_rope")(*arguments),
        ),
        elements=lambda s, t: (
            t * (2 * (s.q_width + s.kv_width) + 2 * s.head_dim),
            t * (3 * (s.q_width + s.kv_width) + 2 * s.head_dim),
        ),
    ),
    Op(
        name="swiglu",
        functions=("swiglu", "packed_swiglu"),
        inputs=lambda s, t: ((random(t, s.intermediate), random(t, s.intermediate)), ()),
        ours=swiglu,
        plain=lambda gate, up: F.silu(gate) * up,
        exact=swiglu_reference,
        liger=lambda gate, up: _liger("liger_swiglu")(gate, up),
        elements=lambda s, t: (3 * t * s.intermediate, 5 * t * s.intermediate),
    ),
    Op(
        name="attention",
        functions=("attention", "qkv_attention"),
        inputs=lambda s, t: (_heads(s, t), ()),
        ours=attention,
        plain=partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
        exact=attention_reference,
        liger=None,  # it has none
        # Backward also reads the output and its gradient.
        elements=lambda s, t: (
            2 * t * (s.q_width + s.kv_width),
            4 * t * (s.q_width + s.kv_width),
        ),
        # Backward computes the scores again.
        flops=lambda s, t: (2.0 * t * (t + 1) * s.q_width, 5.0 * t * (t + 1) * s.q_width),
    ),
    Op(
        name="linear_cross_entropy",
        functions=("linear_cross_entropy",),
        inputs=lambda s, t: (
            (random(t, s.hidden), (0.02 * torch.randn(s.vocab, s.hidden)).bfloat16()),
            (torch.randint(s.vocab, (t,)),),
        ),
        ours=linear_cross_entropy,
        plain=lambda hidden, weight, labels: F.cross_entropy(
            F.linear(hidden, weight).float(), labels
        ),
        exact=lambda hidden, weight, labels: linear_cross_entropy_reference(
            hidden, weight, labels, None, -100
        ),
        liger=None,  # its forward asks the device for the number of labels: no graph can hold it
        # The logits need not be stored.
        elements=lambda s, t: (
            s.hidden * (t + s.vocab),
            2 * s.hidden * (t + s.vocab),
        ),
        flops=lambda s, t: (2.0 * t * s.hidden * s.vocab, 4.0 * t * s.hidden * s.vocab),
    ),
)


class ModelRun:
    """A function on several sets of inputs, forward or forward and backward."""

    def __init__(
        self, function: Callable[..., Any], sets: Sequence[Inputs], upstream: Sequence[Tensor]
    ) -> None:
        self.function = function
        self.calls = len(sets)
        self._pristine = [t for leaves, _ in sets for t in (*leaves, *upstream)]
        # Liger writes gradients over inputs and over what arrives from behind.
        self._used = [t.clone() for t in self._pristine]
        leaves, width = len(sets[0][0]), len(sets[0][0]) + len(upstream)
        self._calls = [
            (self._used[i : i + leaves], constants, self._used[i + leaves : i + width])
            for i, (_, constants) in zip(range(0, len(self._used), width), sets, strict=True)
        ]

    def __call__(self) -> list[list[Tensor]]:
        return [_differentiated(self.function, *call) for call in self._calls]

    def reset(self) -> None:
        torch._foreach_copy_(self._used, self._pristine)

    def results(self, kept: list[list[Tensor]]) -> list[Tensor]:
        return kept[0]

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()


def _differentiated(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    upstream: Sequence[Tensor],
) -> list[Tensor]:
    """Outputs; with ``upstream``, the gradients of the outputs, also those of ``inputs``."""
    # Views are leaves of their own: nothing is left from an earlier call or another stream.
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves, *constants)
    outs = list(out) if isinstance(out, tuple) else [out]
    if not upstream:
        return outs
    return [*outs, *torch.autograd.grad(outs, leaves, upstream)]


def prepare(op: Op, shape: Shape, backward: bool, tokens: int, device: torch.device) -> Work:
    """The work of ``op``, forward, or forward and ``backward``."""
    elements = sum(op.elements(shape, tokens)[: 1 + backward])
    copies = 1 if device.type == "cpu" else max(1, round(COLD_BYTES / BF16 / elements))
    with device:
        sets = [op.inputs(shape, tokens) for _ in range(copies)]
    leaves, constants = sets[0]
    wide = (
        [t.double() for t in leaves],
        [t.double() if t.is_floating_point() else t for t in constants],
    )
    upstream: list[Tensor] = []
    if backward:
        with torch.no_grad():
            outs = op.exact(*wide[0], *wide[1])
        # bf16 in the layout of the outputs, as what follows would return it; 1 for the loss.
        upstream = [
            torch.randn_like(o).bfloat16() if o.dim() else torch.ones_like(o).float()
            for o in (outs if isinstance(outs, tuple) else (outs,))
        ]
        del outs
    exact = [t.detach() for t in _differentiated(op.exact, *wide, [t.double() for t in upstream])]

    def errors(function: Callable[..., Any]) -> list[float]:
        found = _differentiated(function, leaves, constants, upstream)
        return [relative_error(a.detach(), b) for a, b in zip(found, exact, strict=True)]

    def run(provider: str) -> Run:
        functions = {"forge": op.ours, "torch": op.plain, "liger": op.liger}
        if provider == "torch.compile":
            return ModelRun(torch.compile(op.plain, dynamic=False), sets, upstream)
        if provider == "liger":
            import liger_kernel  # noqa: F401
        function = functions[provider]
        assert function is not None
        return ModelRun(function, sets, upstream)

    flops = sum(op.flops(shape, tokens)[: 1 + backward])
    errors_of = {"liger": errors(op.like_liger)} if op.like_liger else {}
    return Work(BF16 * elements, flops, exact, errors(op.plain), run, errors_of)


def model_cases(model: str, shape: Shape, on_gpu: bool) -> Iterator[Case]:
    """Forward, and forward and backward, of every operation of the table.

    A forward pass is one of training: it keeps what backward needs.

    Args:
        model: its name in the names of the cases.
        on_gpu: also what only runs on a GPU.
    """
    for op in OPS:
        providers = ["forge", "torch"]
        if on_gpu:
            providers += ["torch.compile", *(["liger"] if op.liger else [])]
        for backward in (False, True):
            name = f"{model}-forward{'-backward' if backward else ''}"
            work = partial(prepare, op, shape, backward)
            yield Case(op.name, name, (512, 4096), tuple(providers), work)
