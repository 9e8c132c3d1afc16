"""Cases of ``forge-bench kernels`` for the fused update: all matrices of a model, as AdamW.

Weights are bf16, all stored values rounded stochastically. The launches are those of an optimizer
whose backward has just handed over the factors of every gradient: the same queue takes them, in
the order of a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge import ForgeAdamW
from forge.harness import roofline
from forge.harness.hardware import HARDWARE
from forge.harness.kernel_cases import Case, Run, Work, relative_error
from forge.harness.shapes import Gemm, Shape
from forge.kernels.apply_rule import apply_rule_reference
from forge.kernels.target import CapturedTables, Target
from forge.kernels.wgrad_auto import PATHS
from forge.optim.clock import hyper_value
from forge.optim.rules import ADAMW
from forge.optim.states import convert_states, stored_names
from forge.tied import SplitUpdate

OP = "wgrad_update"
# Every part of a step must change more than rounding does, or the gate would pass without it. Here
# an update is larger than the weight, so that one tile in 5,000 left out shows; decay takes 1 %,
# and the bias corrections are 0.65 and 0.40.
HYPER: dict[str, Any] = dict(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
STEP = 10


@dataclass(frozen=True)
class Matrix:
    """A weight [N, K], and the factors of its gradient.

    Attributes:
        dy: [T, N], and ``x`` [T, K], which q, k and v share, as gate and up do.
        start: initial weight and stored states by name; only of those that the gate looks at.
        lookup: of a head that is tied to the embedding, ids [T] and the gradient [T, K] of the rows
            that they looked up.
    """

    rows: int
    dy: Tensor
    x: Tensor
    start: dict[str, Tensor] | None
    lookup: tuple[Tensor, Tensor] | None = None

    @property
    def columns(self) -> int:
        """K."""
        return self.x.shape[1]


class _Update:
    """The update of all matrices by an optimizer: what does not depend on which."""

    calls = 1

    def __init__(self, matrices: Sequence[Matrix], states: str) -> None:
        self.matrices = matrices
        self.states = states
        device = matrices[0].x.device
        self.model = nn.ModuleList(
            nn.Linear(m.columns, m.rows, bias=False, device=device, dtype=torch.bfloat16)
            for m in matrices
        )
        self.weights = list(self.model.parameters())
        for matrix, weight in zip(matrices, self.weights, strict=True):
            if matrix.lookup is not None:
                embedding = nn.Embedding(matrix.rows, matrix.columns, device="meta")
                embedding.weight = weight
                self.model.append(embedding)
        self.optimizer: Any = None

    def _sampled(self) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Tensor]]]:
        """Weight, state and start of each matrix that the gate looks at."""
        for weight, matrix in zip(self.weights, self.matrices, strict=True):
            if matrix.start is not None:
                yield weight, self.optimizer.state[weight], matrix.start

    @torch.no_grad()
    def reset(self) -> None:
        for weight, state, start in self._sampled():
            weight.copy_(start["weight"])
            for name in stored_names(ADAMW, self.states):
                state[name].copy_(start[name])
            state["step"].fill_(STEP - 1)

    def results(self, kept: Any) -> list[Tensor]:
        found = []
        for weight, state, _ in self._sampled():
            values = convert_states(ADAMW, "fp32", weight, state)
            found += [weight.detach(), *(values[name] for name in ADAMW.states)]
        return found


class ForgeUpdate(_Update):
    """By :class:`ForgeAdamW` with one ``path``.

    Raises:
        ValueError: ``path`` cannot update these matrices here.
    """

    def __init__(self, matrices: Sequence[Matrix], states: str, path: str) -> None:
        super().__init__(matrices, states)
        # The weight of an embedding has no paths; "scratch" stands for slices of its gradient.
        self.sliced = path == "scratch" and matrices[0].lookup is not None
        path = "auto" if self.sliced else path
        self.optimizer = ForgeAdamW(self.model, **HYPER, states=states, path=path)
        self._tables: list[CapturedTables] = []

    @torch.no_grad()
    def __call__(self) -> None:
        queue = self.optimizer._queue
        # What autograd does for each weight in turn, and at the end.
        for slot, matrix in zip(
            reversed(self.optimizer._slots), reversed(self.matrices), strict=True
        ):
            dy, x = matrix.dy, matrix.x
            slot.factors = [(x, dy, x._version + dy._version)]
            if matrix.lookup is not None:
                ids, rows = matrix.lookup
                looked_up = (rows, ids, rows._version + ids._version)
                if queue.captured and not self.sliced:
                    # As forge.TrainStep does: the head's product first, at the start of backward.
                    slot.split = SplitUpdate(slot.name, partial(queue.start_split, slot))
                    slot.split.look_up(ids)
                    slot.split.take(x, dy)
                    slot.factors = []
                slot.factors.append(looked_up)
            queue.complete(slot)
        queue.flush()
        self.optimizer.step()
        for slot in self.optimizer._slots:
            slot.split = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        queue, tables = self.optimizer._queue, CapturedTables(self.weights[0].device)
        self._tables.append(tables)  # as long as the graph
        queue.captured = True
        try:
            with tables.collecting():
                yield
        finally:
            queue.captured = False
        tables.fill()


class TorchUpdate(_Update):
    """By a product for each gradient, and torch's fused AdamW over all."""

    def __init__(self, matrices: Sequence[Matrix], states: str) -> None:
        super().__init__(matrices, states)
        options = dict(HYPER, fused=True)
        if matrices[0].x.is_cuda:
            options |= dict(lr=torch.tensor(HYPER["lr"], device="cuda"), capturable=True)
        self.optimizer = torch.optim.AdamW(self.weights, **options)

    def __call__(self) -> None:
        for weight, matrix in zip(reversed(self.weights), reversed(self.matrices), strict=True):
            weight.grad = torch.mm(matrix.dy.t(), matrix.x)
            if matrix.lookup is not None:
                ids, rows = matrix.lookup
                weight.grad += torch.ops.aten.embedding_dense_backward(
                    rows, ids, matrix.rows, -1, False
                )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()


def _start(rows: int, columns: int, states: str) -> dict[str, Tensor]:
    """A weight and states as in the middle of a training, stored as ``states``."""
    size = (rows, columns)
    weight = (0.02 * torch.randn(size)).bfloat16()
    values = dict(exp_avg=0.3 * torch.randn(size), exp_avg_sq=0.5 + torch.rand(size))
    return {"weight": weight, **convert_states(ADAMW, states, weight, values)}


def _matrices(
    products: Sequence[Gemm],
    parts: dict[str, tuple[int, ...]],
    layers: int,
    tokens: int,
    states: str,
    tied: bool,
) -> list[Matrix]:
    """The matrices of all layers in the order of the forward pass; gradients ~ N(0, 1)."""
    found = []
    sample = {0, layers // 2, layers - 1}
    for layer in range(layers):
        for gemm in products:
            x = torch.randn(tokens, gemm.inputs).bfloat16()
            for rows in parts.get(gemm.name, (gemm.outputs,)):
                dy = (torch.randn(tokens, rows) * tokens**-0.5).bfloat16()
                start = _start(rows, gemm.inputs, states) if layer in sample else None
                lookup = None
                if tied:
                    lookup = (torch.randint(rows, (tokens,)), torch.randn_like(x))
                found.append(Matrix(rows, dy, x, start, lookup))
    return found


def _truth(matrix: Matrix, states: str) -> tuple[list[Tensor], list[float]]:
    """Weight and states after a step in fp64, and how far the reference that rounds is off."""
    assert matrix.start is not None
    start = {name: t.clone() for name, t in matrix.start.items()}
    weight, names = start.pop("weight"), stored_names(ADAMW, states)
    hyper = [torch.tensor(hyper_value(HYPER, name), dtype=torch.float64) for name in ADAMW.hyper]
    scalars = ADAMW.scalars.torch(torch.tensor(float(STEP), dtype=torch.float64), tuple(hyper))
    old = convert_states(ADAMW, "fp32", weight, start)
    grad = matrix.dy.double().t() @ matrix.x.double()
    if matrix.lookup is not None:
        ids, rows = matrix.lookup
        grad.index_add_(0, ids, rows.double())
    new, moments = ADAMW.update.torch(
        weight.double(), grad, tuple(old[name].double() for name in ADAMW.states), scalars
    )
    exact = [new, *moments]
    stored = [start[name] for name in names]
    count = len(ADAMW.states)
    apply_rule_reference(
        grad.float(), Target(weight, stored[:count], 0, stored[count:]),
        torch.stack(scalars).float().to(weight.device),
        torch.zeros((), dtype=torch.int32, device=weight.device), ADAMW.update,
    )  # fmt: skip
    rounded = convert_states(ADAMW, "fp32", weight, start)
    values = [weight, *(rounded[name] for name in ADAMW.states)]
    return exact, [relative_error(a, b) for a, b in zip(values, exact, strict=True)]


def _prepare(shape: Shape, head: bool, states: str, tokens: int, device: torch.device) -> Work:
    parts = {
        "qkv": (shape.q_width, shape.kv_width, shape.kv_width),
        "gate+up": (shape.intermediate, shape.intermediate),
    }
    products, layers = ((shape.head,), 1) if head else (shape.gemms, shape.layers)
    with device:
        matrices = _matrices(products, parts, layers, tokens, states, tied=head)
    exact, errors = [], []
    for matrix in matrices:
        if matrix.start is not None:
            values, off = _truth(matrix, states)
            exact += values
            errors += off

    def run(provider: str) -> Run:
        if provider == "torch":
            return TorchUpdate(matrices, states)
        return ForgeUpdate(matrices, states, provider.partition(":")[2] or "auto")

    # Operations and bytes do not depend on the GPU.
    floors = [
        part
        for part in roofline.parts(shape, 1, tokens, HARDWARE["h200"], states)
        if part.group == "update" and part.name.startswith("head") == head
    ]
    moved, flops = sum(part.bytes for part in floors), sum(part.flops for part in floors)
    return Work(moved, flops, exact, errors, run)


def update_cases(model: str, shape: Shape, on_gpu: bool) -> Iterator[Case]:
    """The linears of all layers, with bf16 and 8-bit states, and the head with its embedding.

    Args:
        model: its name in the names of the cases.
        on_gpu: also what only runs on a GPU.
    """
    paths = [f"forge:{path}" for path in PATHS] if on_gpu else []
    for what, states in (("blocks", "bf16"), ("blocks", "int8"), ("head", "bf16")):
        providers = ["forge", *(paths if what == "blocks" else [])]
        if on_gpu:
            providers.append("scratch")
        if states == "bf16":
            providers.append("torch")
        prepare = partial(_prepare, shape, what == "head", states)
        name = f"{model}-{what}-{states}"
        yield Case(OP, name, (512, 1024, 4096), tuple(providers), prepare)
