"""How a training step is launched: eagerly, compiled, or as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge import ForgeOptimizer, TrainStep
from forge.harness.memory import reachable_tensors
from forge.optim.spec import Hyper, OptimizerSpec, backward_then_step

EXECUTIONS = ("eager", "compile", "cuda_graph", "compile+cuda_graph")
Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor]

# The first steps allocate optimizer state and workspaces and compile kernels; none of that may
# happen during a capture. Triton specializes integer arguments on 1, so one step is not enough.
_WARMUP_STEPS = 3


class UnsupportedExecution(ValueError):
    """This method, model or device cannot run in the execution that was asked for."""


def build_step(
    model: nn.Module,
    optimizer: Any,
    spec: OptimizerSpec,
    hyper: Hyper,
    execution: str,
    example: Batch,
) -> Step:
    """A function that runs one whole training step on a batch and returns its loss.

    A step is forward, loss, backward, update and dropping the gradients. With a CUDA graph the
    returned :class:`GraphStep` copies the batch into static buffers and replays the step; building
    it trains a few warm-up steps and then puts parameters, buffers and optimizer state back, so the
    first call is step 1. State that the warm-up created must be in ``optimizer.state`` and start
    at zero, as it does in every capturable method.

    Args:
        model: called as ``model(**batch)``, returns an object with a scalar ``loss``.
        optimizer: what ``spec.build`` returned for ``model`` and ``hyper``.
        execution: one of :data:`EXECUTIONS`.
        example: a batch of the shapes and dtypes to come.

    Raises:
        UnsupportedExecution: no CUDA device, or the method cannot be captured.
        RuntimeError: the capture failed.
        ValueError: ``execution`` is not one of :data:`EXECUTIONS`.
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}, got {execution!r}")
    captured = execution.endswith("cuda_graph")
    if captured:
        _check_capturable(model, spec, hyper, execution)

    def forward(batch: Batch) -> Tensor:
        return model(**batch).loss

    if execution.startswith("compile"):
        forward = torch.compile(forward)

    def step(batch: Batch) -> Tensor:
        loss = forward(batch)
        spec.train(optimizer, loss, hyper)
        return loss.detach()

    if not captured:
        return step
    if isinstance(optimizer, ForgeOptimizer):
        return _capture_forge(model, optimizer, example)
    return _capture(step, model, optimizer, spec, example)


def build_split_step(
    model: nn.Module, optimizer: Any, spec: OptimizerSpec, example: Batch
) -> GraphStep:
    """Forward and backward as one CUDA graph, the optimizer's step launched eagerly after it.

    For methods whose step cannot be captured: what is left of the launches of an eager step are the
    optimizer's own. Gradients are static and stay in memory: every replay writes them anew.

    Args:
        spec: of a method that trains by ``backward_then_step``.

    Raises:
        UnsupportedExecution: the model is on no CUDA device, or the update happens in backward.
        RuntimeError: the capture failed.
    """
    if next(model.parameters()).device.type != "cuda":
        raise UnsupportedExecution("a split step needs a CUDA device; use execution=eager")
    if spec.train is not backward_then_step or isinstance(optimizer, ForgeOptimizer):
        raise UnsupportedExecution(
            f"{spec.method} updates inside backward, so there is no step to split off; use "
            "execution=eager or cuda_graph"
        )

    def gradients(batch: Batch) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    captured = _capture(gradients, model, optimizer, spec, example)

    def step(batch: Batch) -> Tensor:
        loss = captured(batch)
        optimizer.step()
        return loss

    return GraphStep(step, captured.shapes, captured.peak_bytes)


def _check_capturable(model: nn.Module, spec: OptimizerSpec, hyper: Hyper, execution: str) -> None:
    device = next(model.parameters()).device.type
    if device != "cuda":
        raise UnsupportedExecution(
            f"execution={execution}: the model is on {device}, a CUDA graph needs a CUDA device; "
            "use execution=eager"
        )
    if not spec.capturable:
        limits = f" ({', '.join(spec.limits)})" if spec.limits else ""
        raise UnsupportedExecution(
            f"execution={execution}: the step of {spec.method} cannot be captured{limits}; "
            "use execution=eager"
        )
    if execution.startswith("compile") and spec.target.startswith("forge:"):
        raise UnsupportedExecution(
            f"execution={execution}: the compiler does not trace layers that update in backward; "
            "use execution=cuda_graph"
        )
    if not hyper.capturable:
        raise UnsupportedExecution(
            f"execution={execution}: needs an optimizer built with Hyper(capturable=True)"
        )


@dataclass
class GraphStep:
    """A captured training step. Call it with a batch of the captured shapes.

    The returned loss is one static tensor: the next call overwrites it.

    Attributes:
        peak_bytes: highest allocated memory during the capture. Replays allocate nothing that the
            allocator sees, so this is the peak of a step.
    """

    replay: Step
    shapes: dict[str, tuple[int, ...]]
    peak_bytes: int

    def __call__(self, batch: Batch) -> Tensor:
        shapes = _shapes(batch)
        if shapes != self.shapes:
            raise ValueError(f"batch has shapes {shapes}, the graph was captured for {self.shapes}")
        return self.replay(batch)


def _capture(
    step: Step, model: nn.Module, optimizer: Any, spec: OptimizerSpec, example: Batch
) -> GraphStep:
    device = next(model.parameters()).device
    buffers = {name: tensor.to(device, copy=True) for name, tensor in example.items()}
    # Warm-up and capture share a stream: autograd runs a backward op on the stream of its forward.
    stream = torch.cuda.Stream(device)
    _warm_up(step, model, optimizer, buffers, stream)
    # Gradients must be born inside the graph's memory pool.
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.cuda.graph(graph, stream=stream):
            loss = step(buffers)
    except Exception as error:
        # Ending a broken capture raises too; what broke it is the context of that second error.
        cause = error.__context__ or error
        recover(stream)
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        raise RuntimeError(f"{spec.method}: CUDA graph capture failed: {cause}") from cause
    peak = torch.cuda.max_memory_allocated(device)

    def replay(batch: Batch, _alive: tuple[Any, ...] = (model, optimizer)) -> Tensor:
        for name, buffer in buffers.items():
            buffer.copy_(batch[name], non_blocking=True)
        graph.replay()
        return loss

    return GraphStep(replay, _shapes(example), peak)


def _shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


def _capture_forge(model: nn.Module, optimizer: ForgeOptimizer, example: Batch) -> GraphStep:
    """Its first call runs eagerly, as :class:`TrainStep` does, the second captures."""
    device = next(model.parameters()).device
    train_step = TrainStep(model, optimizer)
    calls = 0

    def replay(batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            torch.cuda.reset_peak_memory_stats(device)
            train_step.capture(**batch)
            step.peak_bytes = torch.cuda.max_memory_allocated(device)
        return train_step(**batch)

    step = GraphStep(replay, _shapes(example), peak_bytes=0)
    return step


def recover(stream: torch.cuda.Stream) -> None:
    """Make the device's random generator usable again: a broken capture leaves it capturing."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.zeros(1, device=stream.device)


def _warm_up(
    step: Step, model: nn.Module, optimizer: Any, batch: Batch, stream: torch.cuda.Stream
) -> None:
    with restored(model, optimizer):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_STEPS):
                step(batch)
        torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def restored(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Put parameters, buffers and optimizer state back to what they were before the block.

    In place, so that a graph captured afterwards sees the same memory. State that the block created
    stays allocated and is set to zero.
    """
    tensors = (*model.parameters(), *model.buffers(), *reachable_tensors(optimizer, skip=model))
    known = {id(tensor): tensor for tensor in tensors}
    saved = [(tensor, tensor.detach().clone()) for tensor in known.values()]
    yield
    # Through `.data`, unseen by versions, as a replay writes: optimizers may refuse edited states.
    for tensor, value in saved:
        tensor.data.copy_(value)
    for tensor in reachable_tensors(optimizer.state, skip=model):
        if id(tensor) not in known:
            tensor.data.zero_()
