"""The whole training step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from forge.kernels.target import CapturedTables
from forge.optimizer import ForgeOptimizer


@dataclass(frozen=True)
class _Graph:
    """A captured step, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss: Tensor


class TrainStep:
    """Forward, loss, backward and update of a model in one call, on a GPU as one CUDA graph.

        step = TrainStep(model, optimizer)
        loss = step(input_ids=ids, labels=ids)

    The first call with inputs of new shapes runs the step eagerly, the second captures it, and
    from then on it is replayed. Every call is one training step with its own inputs. Learning
    rate, weight decay and the like, the step count and the rounding seed may change between calls
    without a new capture; after ``load_state_dict`` or when parameters were moved, frozen or
    exchanged, the step is captured anew.

    Args:
        model: called with the keyword arguments of the step. Returns the loss: a scalar tensor, or
            an object with a ``loss``, as Hugging Face models do when they get ``labels``.
        optimizer: holds every parameter of ``model`` that requires a gradient.
        graph: False runs every step eagerly. By default True on a GPU; there are no graphs on a
            CPU.
        max_graphs: shapes that may be captured. Each takes memory for its inputs; activations
            share one pool.

    Raises:
        TypeError: ``optimizer`` is not one of this package.
        ValueError: ``graph=True`` without a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: ForgeOptimizer,
        *,
        graph: bool | None = None,
        max_graphs: int = 8,
    ) -> None:
        if not isinstance(optimizer, ForgeOptimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}: only optimizers of this package, such "
                "as ForgeAdamW, keep what a graph needs on the device"
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if graph and device.type != "cuda":
            raise ValueError(f"graph=True: the model is on {device}, a CUDA graph needs a GPU")
        self.model = model
        self.optimizer = optimizer
        self.graph = device.type == "cuda" if graph is None else graph
        if self.graph and optimizer.on_nonfinite != "propagate":
            raise ValueError(
                f"on_nonfinite={optimizer.on_nonfinite!r} looks at every step's norm on the host, "
                "which a graph cannot: use graph=False, or on_nonfinite='propagate'"
            )
        self.max_graphs = max_graphs
        self._device = device
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: the shape has run eagerly once
        self._layout: list[Any] = []
        self._pool: Any = None
        self._stream: Any = None
        self._tables: Any = None

    def __call__(self, **inputs: Any) -> Tensor:
        """Train one step. Returns the loss, detached; reading its value waits for the GPU.

        Args:
            inputs: the model's keyword arguments. Tensors may change from call to call; other
                values are part of the shape.

        Raises:
            RuntimeError: more than ``max_graphs`` shapes; the step cannot be captured (the message
                says why; model and optimizer are unharmed); a parameter that the optimizer does not
                hold gets a gradient.
        """
        inputs = {
            name: value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        if not self.graph:
            return self._step(inputs)
        layout = self._current_layout()
        if len(layout) != len(self._layout) or not all(map(is_, layout, self._layout)):
            self._graphs.clear()
            self._pool = self._tables = None
        key = self._key(inputs)
        if key not in self._graphs:
            if len(self._graphs) >= self.max_graphs:
                raise RuntimeError(
                    f"inputs of {len(self._graphs) + 1} different shapes, max_graphs="
                    f"{self.max_graphs}: pad the batches to a few lengths, raise max_graphs, or "
                    "use graph=False"
                )
            with self._on_side_stream():
                loss = self._step(inputs)
            self._refuse_stray_gradients()
            self._graphs[key] = None
            self._layout = self._current_layout()
            return loss
        captured = self._graphs[key] = self._graphs[key] or self._capture(inputs)
        for name, buffer in captured.inputs.items():
            buffer.copy_(inputs[name], non_blocking=True)
        for clock in self.optimizer._clocks:
            clock.refresh()
        captured.graph.replay()
        # Graphs that still hold the old weights must not be differentiated.
        increment_version([slot.param for slot in self.optimizer._slots])
        return captured.loss.clone()

    def capture(self, **inputs: Any) -> None:
        """Capture the step for inputs like these now, without training, not at the next call.

        Raises:
            RuntimeError: they have not run eagerly yet, which the first call does; there are no
                graphs here; or the step cannot be captured.
        """
        key = self._key(inputs)
        if key not in self._graphs:
            raise RuntimeError("capture(): call the step once with inputs of these shapes first")
        self._graphs[key] = self._graphs[key] or self._capture(inputs)

    def _step(self, inputs: Mapping[str, Any]) -> Tensor:
        loss = self._loss(self.model(**inputs))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @staticmethod
    def _loss(output: Any) -> Tensor:
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                "the model must return a scalar loss or an object with a `loss`; Hugging Face "
                "models do when they get labels="
            )
        return loss

    def _current_layout(self) -> list[Any]:
        """The objects that a captured graph has baked in; compared by identity."""
        self.optimizer.check_unedited()
        layout: list[Any] = [self.model.training]
        for slot in self.optimizer._slots:
            target = slot.target
            if target is not None and target.address != slot.param.data_ptr():
                target = slot.target = None
            layout += (target, slot.clock, slot.param.requires_grad)
        return layout

    @staticmethod
    def _key(inputs: Mapping[str, Any]) -> Hashable:
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        parts: list[Hashable] = [autocast]
        for name, value in sorted(inputs.items()):
            if isinstance(value, Tensor):
                parts.append((name, tuple(value.shape), value.dtype))
            elif isinstance(value, Hashable):
                parts.append((name, value))
            else:
                raise TypeError(
                    f"{name}= is a {type(value).__name__}: a captured step takes tensors and "
                    "plain values; use graph=False"
                )
        return tuple(parts)

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """What is captured must not touch the default stream; so autograd's nodes are made here."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        queue = self.optimizer._queue
        queue.captured = True
        try:
            with torch.cuda.stream(self._stream):
                for slot in self.optimizer._slots:
                    if slot.param.requires_grad:
                        slot.renew(queue)
                yield
        finally:
            queue.captured = False
            current.wait_stream(self._stream)

    def _refuse_stray_gradients(self) -> None:
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                raise RuntimeError(
                    f"{name!r} got a gradient but is not in the optimizer: freeze it "
                    "(requires_grad_(False)) or give it to the optimizer"
                )

    def _capture(self, inputs: Mapping[str, Any]) -> _Graph:
        buffers = {
            name: value.to(self._device, copy=True)
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        }
        graph = torch.cuda.CUDAGraph()
        if self._tables is None:
            self._tables = CapturedTables(self._device)
        for clock in self.optimizer._clocks:
            clock.refresh()
        try:
            with self._on_side_stream(), self._tables.collecting():
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    loss = self._step({**inputs, **buffers})
        except Exception as error:
            self._abandon()
            # Ending a broken capture raises too; what broke it is that error's context.
            cause = error.__context__ or error
            reason = str(cause).partition("\n")[0]
            raise RuntimeError(
                f"the step cannot be captured in a CUDA graph: {reason}; use graph=False"
            ) from cause
        self._pool = graph.pool()
        self._tables.fill()
        return _Graph(graph, buffers, loss)

    def _abandon(self) -> None:
        """Undo what a broken capture has left in Python; nothing of it ran on the device."""
        # A broken capture leaves the device's random generator capturing; a whole one frees it.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            torch.zeros(1, device=self._device)
        optimizer = self.optimizer
        optimizer._queue.discard()
        for slot in optimizer._slots:
            slot.factors, slot.updated, slot.param.grad = [], False, None
        for clock in optimizer._clocks:
            clock.running = False
