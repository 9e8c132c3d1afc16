"""The whole training step in one call, on a GPU replayed from CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from forge.following import same
from forge.kernels.target import CapturedTables
from forge.linear import Slot
from forge.optimizer import ForgeOptimizer
from forge.tied import SplitUpdate

_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


@dataclass
class _Graph:
    """A captured step, with the tensors that it reads and writes.

    Two graphs: a forward pass that changes nothing may start before the host has made sure that the
    step is still what was captured. If it is not, that pass was for nothing.
    """

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph  # and update
    inputs: dict[str, Tensor]
    loss: Tensor
    pure: bool  # whether the forward pass writes to no tensor of the model and draws no numbers


class _Layout:
    """What a captured graph has baked in: the model's parts, where they lie, the optimizer's."""

    def __init__(self, model: nn.Module, optimizer: ForgeOptimizer) -> None:
        self._slots = optimizer._slots
        self._modules = list(model.modules())
        dicts: list[dict[str, Any]] = []
        for module in self._modules:
            parts: tuple[Any, ...] = (module._parameters, module._buffers, module._modules)
            dicts += parts
        # Most are empty, which is told faster than what they hold.
        self._dicts = [part for part in dicts if part]
        self._empty = [part for part in dicts if not part]
        held = (slot.param for slot in self._slots)
        tensors = {id(t): t for t in chain(model.parameters(), model.buffers(), held)}
        self._tensors = list(tensors.values())
        # A forward pass that was launched too early must not read memory of somebody else.
        self._memory = [tensor.untyped_storage() for tensor in self._tensors]
        self._objects, self._values = self._read()

    def _read(self) -> tuple[list[Any], list[Any]]:
        # Before every replay: passes over lists, not over the model.
        objects: list[Any] = list(chain.from_iterable(map(dict.values, self._dicts)))
        for slot in self._slots:
            objects += (slot.target, slot.clock)
        values: list[Any] = [module.training for module in self._modules]
        for tensor in self._tensors:
            values += (tensor.requires_grad, tensor.data_ptr())
        return objects, values

    def is_current(self) -> bool:
        objects, values = self._read()
        return values == self._values and same(objects, self._objects) and not any(self._empty)


class TrainStep:
    """Forward, loss, backward and update of a model in one call, on a GPU from CUDA graphs.

        step = TrainStep(model, optimizer)
        loss = step(input_ids=ids, labels=ids)

    The first call with inputs of new shapes runs the step eagerly, the second captures it, and
    from then on it is replayed. Every call is one training step with its own inputs. Learning
    rate, weight decay and the like, the step count and the rounding seed may change between calls
    without a new capture; after ``load_state_dict`` or when parameters, buffers or modules were
    moved, frozen, exchanged or switched by ``train()`` and ``eval()``, the step is captured anew.

    A replay runs what the GPU ran, not the model's Python: values that it computes on the host,
    hooks with other effects and branches stay as they were captured.

    Args:
        model: called with the keyword arguments of the step. Returns the loss: a scalar tensor, or
            an object with a ``loss``, as Hugging Face models do when they get ``labels``.
        optimizer: holds every parameter of ``model`` that requires a gradient. Step hooks are
            Python and need ``graph=False``.
        graph: False runs every step eagerly. By default True on a GPU; there are no graphs on a
            CPU.
        max_graphs: shapes that may be captured. Each takes memory for its inputs; activations
            share one pool.

    Raises:
        TypeError: ``optimizer`` is not one of this package.
        ValueError: ``graph=True`` without a GPU; ``max_graphs`` below 1.
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
        if max_graphs < 1:
            raise ValueError(f"max_graphs={max_graphs}: must be 1 or more; graph=False has none")
        self.model = model
        self.optimizer = optimizer
        self.max_graphs = max_graphs
        self._wanted = graph
        self._device = self._model_device()
        if graph and self._device.type != "cuda":
            raise ValueError(f"graph=True: the model is on {self._device}, a graph needs a GPU")
        if self.graph and optimizer.on_nonfinite != "propagate":
            raise ValueError(
                f"on_nonfinite={optimizer.on_nonfinite!r} looks at every step's norm on the host, "
                "which a graph cannot: use graph=False, or on_nonfinite='propagate'"
            )
        self._checked = False
        self._stream: Any = None
        self._forget()

    @property
    def graph(self) -> bool:
        """Whether steps are captured where the model is now."""
        return self._device.type == "cuda" and self._wanted is not False

    def _model_device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _forget(self) -> None:
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: the shape has run eagerly once
        self._layout: _Layout | None = None
        self._pool: Any = None
        self._tables: Any = None

    def __call__(self, **inputs: Any) -> Tensor:
        """Train one step. Returns the loss, detached; reading its value waits for the GPU.

        Args:
            inputs: the model's keyword arguments. Tensors may change from call to call; other
                values are part of the shape.

        Raises:
            RuntimeError: more than ``max_graphs`` shapes; the step cannot be captured (the message
                says why; model and optimizer are unharmed); a parameter that requires a gradient
                is not the optimizer's; gradients, or a ``backward()``, from outside the step.
            TypeError: an input that is neither a tensor nor a plain value, or a tensor that wants a
                gradient, where the step is captured.
        """
        device = self._model_device()
        if device != self._device:
            self._device, self._stream = device, None
            self._forget()
        inputs = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        if not self.graph:
            self._refuse_gradients()
            if not self._checked:
                self._refuse_strangers()
                self._checked = True
            return self._step(inputs)
        key = self._key(inputs)
        started = self._graphs.get(key)
        if started is not None and started.pure:
            self._start(started, inputs)
        self._prepare()
        if key not in self._graphs:
            if len(self._graphs) >= self.max_graphs:
                raise RuntimeError(
                    f"inputs of {len(self._graphs) + 1} different shapes, max_graphs="
                    f"{self.max_graphs}: pad the batches to a few lengths, raise max_graphs, or "
                    "use graph=False"
                )
            self._refuse_strangers()
            with self._on_side_stream():
                loss = self._step(inputs)
            if self._layout is None or not self._layout.is_current():
                # This shape has brought new states or counts: graphs of others know the old ones.
                self._forget()
                self._layout = _Layout(self.model, self.optimizer)
            self._graphs[key] = None
            return loss
        self._refuse_hooks()
        captured = self._graphs[key] = self._graphs[key] or self._capture(inputs)
        if captured is not started or not captured.pure:
            before = self._random_state()
            self._start(captured, inputs)
            # A replay moves the generator on, which no capture shows.
            captured.pure = captured.pure and torch.equal(before, self._random_state())
        for clock in self.optimizer._clocks:
            clock.refresh()
        captured.backward.replay()
        # Graphs that still hold the old weights must not be differentiated.
        increment_version([slot.param for slot in self.optimizer._slots])
        return captured.loss.clone()

    @staticmethod
    def _start(captured: _Graph, inputs: Mapping[str, Any]) -> None:
        """Launch the forward pass, of a capture that the model may have left behind."""
        for name, buffer in captured.inputs.items():
            buffer.copy_(inputs[name], non_blocking=True)
        captured.forward.replay()

    def capture(self, **inputs: Any) -> None:
        """Capture the step for inputs like these now, without training, not at the next call.

        Raises:
            RuntimeError: they have not run eagerly yet, which the first call does; there are no
                graphs here; or the step cannot be captured.
        """
        if not self.graph:
            raise RuntimeError("capture(): this TrainStep runs eagerly, on a CPU or by graph=False")
        key = self._key(inputs)
        self._prepare()
        if key not in self._graphs:
            raise RuntimeError("capture(): call the step once with inputs of these shapes first")
        self._refuse_hooks()
        self._graphs[key] = self._graphs[key] or self._capture(inputs)

    def _prepare(self) -> None:
        """Refuse gradients from elsewhere; forget graphs that no longer fit."""
        self._refuse_gradients()
        self.optimizer.check_unedited()
        if self._layout is not None and not self._layout.is_current():
            self._forget()

    def _refuse_gradients(self) -> None:
        for slot in self.optimizer._slots:
            if slot.param.grad is not None or slot.updated:
                raise RuntimeError(
                    f"{slot.name!r} has a gradient from outside the step: call optimizer.step() or "
                    "optimizer.zero_grad() first"
                )

    def _refuse_hooks(self) -> None:
        if (
            self.optimizer._optimizer_step_pre_hooks
            or self.optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        ):
            raise RuntimeError("step hooks do not run when a graph is replayed; use graph=False")

    def _step(self, inputs: Mapping[str, Any]) -> Tensor:
        # Within one autocast context weights are cast once: neither those that an earlier step has
        # moved since may serve again, nor copies that lie in a graph's memory.
        torch.clear_autocast_cache()
        loss = self._loss(self.model(**inputs))
        self._finish(loss)
        return loss.detach()

    def _finish(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.clear_autocast_cache()

    @staticmethod
    def _loss(output: Any) -> Tensor:
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                "the model must return a scalar loss or an object with a `loss`; Hugging Face "
                "models do when they get labels="
            )
        return loss

    @staticmethod
    def _key(inputs: Mapping[str, Any]) -> Hashable:
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        parts: list[Hashable] = [autocast]
        for name, value in sorted(inputs.items()):
            if isinstance(value, Tensor):
                if value.requires_grad:
                    raise TypeError(
                        f"{name}= requires a gradient, which a captured step does not pass on: "
                        "detach() it, or use graph=False"
                    )
                parts.append((name, tuple(value.shape), value.dtype))
            else:
                parts.append((name, _plain(name, value)))
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

    def _refuse_strangers(self) -> None:
        held = {id(slot.param) for slot in self.optimizer._slots}
        for name, param in self.model.named_parameters():
            if param.requires_grad and id(param) not in held:
                raise RuntimeError(
                    f"{name!r} wants a gradient but is not in the optimizer: pass the optimizer of "
                    "this model, give the parameter to it, or freeze it (requires_grad_(False))"
                )

    def _capture(self, inputs: Mapping[str, Any]) -> _Graph:
        optimizer = self.optimizer
        tied = [slot for slot in optimizer._slots if slot.shared and slot.embeds]
        if tied and not optimizer._queue.deferred:
            try:
                return self._capture_once(inputs, tied)
            except RuntimeError as error:
                names = ", ".join(slot.name for slot in tied)
                warnings.warn(
                    f"{names}: updated at the end of the backward pass, which takes more time and "
                    f"memory, because {error.__cause__ or error}",
                    stacklevel=3,
                )
        return self._capture_once(inputs, [])

    def _capture_once(self, inputs: Mapping[str, Any], tied: list[Slot]) -> _Graph:
        """Capture the step, with the update of the ``tied`` weights in two parts."""
        buffers = {
            name: value.to(self._device, copy=True)
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        }
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        if self._tables is None:
            self._tables = CapturedTables(self._device)
        for clock in self.optimizer._clocks:
            clock.refresh()
        queue = self.optimizer._queue
        # The graph gets workspaces of its own; what eager steps left would stay beside them.
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with self._on_side_stream(), self._tables.collecting():
                for slot in tied:
                    slot.split = SplitUpdate(slot.name, partial(queue.start_split, slot))
                torch.clear_autocast_cache()
                versions = self._versions()
                with torch.cuda.graph(forward, pool=self._pool, stream=self._stream):
                    loss = self._loss(self.model(**{**inputs, **buffers}))
                pure = versions == self._versions()
                # The backward pass, in another thread, has its own; this one's memory it may use.
                torch._C._cuda_clearCublasWorkspaces()
                with torch.cuda.graph(backward, pool=forward.pool(), stream=self._stream):
                    self._finish(loss)
        except Exception as error:
            # Destroyed later, with the error that holds them, they could break another capture.
            forward.reset()
            backward.reset()
            self._abandon()
            raise _not_captured(error)  # noqa: B904
        finally:
            for slot in tied:
                slot.split = None
        self._pool = forward.pool()
        self._tables.fill()
        return _Graph(forward, backward, buffers, loss.detach(), pure)

    def _versions(self) -> list[int]:
        # Parameters too: codebooks and averages that a forward pass keeps are frozen ones.
        return [t._version for t in chain(self.model.parameters(), self.model.buffers())]

    def _random_state(self) -> Tensor:
        """The state of the device's random generator, which lies on the host."""
        return torch.cuda.get_rng_state(self._device)

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


def _not_captured(error: Exception) -> RuntimeError:
    """What to raise for ``error``, with its cause."""
    # Ending a broken capture raises too; what broke it is that error's context.
    cause = error.__context__ or error
    reason = str(cause).partition("\n")[0]
    refused = RuntimeError(
        f"the step cannot be captured in a CUDA graph: {reason}; use graph=False"
    )
    refused.__cause__ = cause
    return refused


def _plain(name: str, value: Any) -> Hashable:
    """``value`` and its type, which equal numbers do not share, as part of a key."""
    if isinstance(value, tuple):
        return tuple(_plain(name, part) for part in value)
    if value is None or isinstance(value, _PLAIN):
        return type(value), value
    raise TypeError(
        f"{name}= is a {type(value).__name__}: a captured step takes tensors and plain values, "
        "each as an argument of its own; use graph=False"
    )
