"""What a Gluon kernel handles, for gluon_on_cpu.py: integers, tensors, memory, descriptors."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forge.kernels import runtime

with pytest.MonkeyPatch.context() as patch:
    if runtime.INTERPRETED:  # Triton is, as conftest.py imported it, and Gluon asks for that
        patch.setenv("TRITON_INTERPRET", "1")
    from triton.experimental.gluon import language as real
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES |= {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}
# torch computes little with 32 bits without a sign.
_DTYPES |= {"uint32": torch.int64}


def torch_dtype(dtype: Any) -> torch.dtype:
    return _DTYPES[str(getattr(dtype, "value", dtype))]


class Int(int):
    """An integer that divides as hardware does: towards zero."""

    def to(self, _: Any) -> Int:
        return self

    def __floordiv__(self, other: int) -> Int:
        whole = abs(int(self)) // abs(int(other))
        return Int(-whole if (self < 0) != (other < 0) else whole)

    def __mod__(self, other: int) -> Int:
        return Int(int(self) - int(other) * int(self // other))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul"):
    _plain = getattr(int, f"__{_name}__")

    def _method(self: Int, other: Any, plain: Callable = _plain) -> Any:
        found = plain(self, other)
        return found if found is NotImplemented else Int(found)

    setattr(Int, f"__{_name}__", _method)


class Tile:
    """A tensor in registers."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape = list(tensor.shape)
        self.type = types.SimpleNamespace(layout=None)

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        kind = torch_dtype(dtype)
        return Tile(self.tensor.view(kind) if bitcast else self.tensor.to(kind))

    def reshape(self, shape: Any) -> Tile:
        return Tile(self.tensor.reshape([int(n) for n in shape]))

    def permute(self, order: Any) -> Tile:
        return Tile(self.tensor.permute(order))

    def split(self) -> tuple[Tile, ...]:
        return tuple(map(Tile, self.tensor.unbind(-1)))

    def __getitem__(self, at: Any) -> Tile:
        return Tile(self.tensor[at])


def bare(x: Any) -> Any:
    if isinstance(x, Product):
        raise AssertionError("a product is used before it has been waited for")
    return x.tensor if isinstance(x, Tile) else x


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "le",
    "ge",
    "gt",
    "lt",
    "eq",
    "ne",
    "and_",
    "or_",
    "lshift",
    "rshift",
):
    _op = getattr(operator, _name)
    _short = _name.rstrip("_")
    setattr(Tile, f"__{_short}__", lambda a, b, op=_op: Tile(op(bare(a), bare(b))))
    setattr(Tile, f"__r{_short}__", lambda a, b, op=_op: Tile(op(bare(b), bare(a))))


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + bare(more))


class Memory:
    """A piece of shared memory."""

    def __init__(self, bytes: Tensor, dtype: Any, shape: Any) -> None:
        self.bytes, self.dtype, self.shape = bytes, dtype, [int(n) for n in shape]
        assert bytes.numel() == torch.Size(self.shape).numel() * torch_dtype(dtype).itemsize
        self.order: Any = None

    @property
    def tensor(self) -> Tensor:
        whole = self.bytes.view(torch_dtype(self.dtype)).view(self.shape)
        return whole if self.order is None else whole.permute(self.order)

    def index(self, i: int) -> Memory:
        size = self.bytes.numel() // self.shape[0]
        assert 0 <= i < self.shape[0], f"slot {i} of {self.shape[0]}"
        return Memory(self.bytes[i * size : (i + 1) * size], self.dtype, self.shape[1:])

    def permute(self, order: Any) -> Memory:
        found = Memory(self.bytes, self.dtype, self.shape)
        found.order = order
        return found

    def slice(self, start: int, length: int, dim: int) -> Tile:
        """Some columns, say: a view, to be read."""
        return Tile(self.tensor.narrow(dim, int(start), int(length)))

    def store(self, x: Tile) -> None:
        assert x.tensor.shape == self.tensor.shape and x.tensor.dtype == self.tensor.dtype
        self.tensor.copy_(x.tensor)

    def load(self, _layout: Any) -> Tile:
        return Tile(self.tensor.clone())


class Descriptor:
    """Of a tensor and the boxes that are copied."""

    def __init__(self, tensor: Tensor, block_shape: list[int], layout: Any) -> None:
        self.tensor, self.block_shape, self.layout = tensor, list(block_shape), layout
        names = {kind: name for name, kind in _DTYPES.items()}
        gluon = {"bf16": real.bfloat16, "fp16": real.float16, "fp32": real.float32}
        self.dtype = gluon[names[tensor.dtype]]

    def part(self, coords: Any) -> tuple[Tensor, tuple[slice, ...]]:
        """What of the tensor is in the box, and where in the box it is."""
        assert len(coords) == self.tensor.dim()
        inside, box = [], []
        for start, size, n in zip(coords, self.block_shape, self.tensor.shape, strict=True):
            begin, end = max(int(start), 0), min(int(start) + size, n)
            end = max(begin, end)
            inside.append(slice(min(begin, n), max(end, min(begin, n))))
            box.append(slice(begin - int(start), end - int(start)))
        return self.tensor[tuple(inside)], tuple(box)


class Product:
    """The result of an asynchronous product, which reads its operands as late as it may."""

    def __init__(self, a: Any, b: Memory, acc: Any, use_acc: bool) -> None:
        self.operands, self.tensor = (a, b, acc, use_acc), None

    def finish(self) -> None:
        a, b, acc, use_acc = self.operands
        acc = acc.tensor
        found = a.tensor.float() @ b.tensor.float()
        self.tensor = found + acc if use_acc else found
