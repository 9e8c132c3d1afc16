"""Memory: peaks of the timed steps, and the exact bytes of optimizer state."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

GIB = 2**30


def state_bytes(optimizer: Any, model: nn.Module) -> int:
    """Bytes of every tensor reachable from ``optimizer`` that is not a parameter or its gradient.

    Follows dicts, sequences, object attributes, closures of hooks and the inner tensors of tensor
    subclasses; a storage that several tensors share counts once.
    """
    own = {key for p in model.parameters() for t in (p, p.grad) if t is not None for key in keys(t)}
    own |= {key for buffer in model.buffers() for key in keys(buffer)}
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in reachable_tensors(optimizer, skip=model):
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            sizes[(plain.device, storage.data_ptr())] = storage.nbytes()
    return sum(size for key, size in sizes.items() if key not in own)


def keys(tensor: Tensor) -> list[tuple[torch.device, int]]:
    """Identity of the storages behind ``tensor``."""
    return [(t.device, t.untyped_storage().data_ptr()) for t in plain_tensors(tensor)]


def plain_tensors(tensor: Tensor) -> Iterable[Tensor]:
    """``tensor`` itself, or what a wrapper subclass (torchao's 8-bit state, say) is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def reachable_tensors(root: Any, skip: nn.Module) -> Iterable[Tensor]:
    """Every tensor reachable from ``root`` through containers, attributes and closures.

    Does not enter ``skip`` or its sub-modules, classes, modules or plain functions' globals.
    """
    seen: set[int] = {id(module) for module in skip.modules()}
    kept: list[Any] = []
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, _LEAVES):
            continue
        seen.add(id(item))
        kept.append(item)
        if isinstance(item, Tensor):
            yield item
        stack.extend(_children(item))


_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device)


def _children(item: Any) -> list[Any]:
    if isinstance(item, Tensor):
        # FORGE and gradient-release optimizers may hang per-parameter state on the parameter.
        return list(getattr(item, "__dict__", {}).values())
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    found: list[Any] = []
    if hasattr(item, "__closure__"):
        found += [_cell_contents(cell) for cell in item.__closure__ or ()]
        return found
    if hasattr(item, "__self__"):
        found.append(item.__self__)
    if type(item).__module__ not in ("builtins", "types"):
        found += list(getattr(item, "__dict__", {}).values())
        for cls in type(item).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            found += [getattr(item, name) for name in names if hasattr(item, name)]
    return found


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the enclosing function has not assigned the name
        return None


class GradientMeter:
    """Most bytes of gradients that exist when an optimizer's ``step()`` begins.

    They are then all in memory beside weights and states, so the three add up to no more than the
    peak. For the first step only: :meth:`stop` removes the hooks before anything is timed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.most = 0
        self.hooks: list[Any] = []

    def watch(self, optimizer: Any) -> None:
        """Look before every step of ``optimizer``, a :class:`torch.optim.Optimizer` or an object
        with some as attributes (one for the matrices and one for the rest)."""
        for part in (optimizer, *getattr(optimizer, "__dict__", {}).values()):
            if isinstance(part, torch.optim.Optimizer):
                self.hooks.append(part.register_step_pre_hook(self._look))

    def _look(self, *_: Any) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        held = sum(plain.nbytes for grad in grads for plain in plain_tensors(grad))
        self.most = max(self.most, held)

    def stop(self) -> int | None:
        """The bytes, or ``None`` where there was no :class:`torch.optim.Optimizer` to watch."""
        for hook in self.hooks:
            hook.remove()
        return self.most if self.hooks else None


class PeakMeter:
    """Peak memory since the last :meth:`reset`, in GiB: CUDA allocator, or resident set on CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.kind = "cuda max allocated" if self.cuda else "process peak RSS"

    def reset(self) -> None:
        """Start a new measurement."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.kind = "process peak RSS since start"

    def read(self) -> tuple[float, float | None]:
        """Peak allocated and peak reserved (``None`` on CPU)."""
        if self.cuda:
            return torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        return _peak_rss_bytes() / GIB, None


def _peak_rss_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
