"""Runs a Gluon kernel on the CPU: what it computes, and whether anything waits for ever.

Gluon has no interpreter. This one knows as much of it as the kernels use that are tested so: every
group of warps is a thread, its tensors are torch's, layouts mean nothing. Barriers count arrivals,
bytes and phases as the hardware does. What is asynchronous may happen at any time between when it
is asked for and when it is waited for: ``late`` chooses one end for copies (at the request, or when
somebody waits for their barrier), products are formed at their wait, and to use a result before it
is an error. Shared memory begins as NaN. A wait of some seconds is taken for an endless one.

Not seen: warps of a group that run apart, layouts, swizzles, and where shared memory lies.
"""

from __future__ import annotations

import itertools
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from .gluon_values import (
    Descriptor,
    Int,
    Memory,
    Pointer,
    Product,
    TensorDescriptor,
    Tile,
    bare,
    real,
    torch_dtype,
)

PATIENCE = 20.0


class Barrier:
    def __init__(self, machine: Program) -> None:
        self.machine = machine
        self.count = 0  # arrivals a phase; 0: not initialised
        self.phase = self.arrived = self.bytes = 0
        self.copies: list[Callable] = []  # that have been asked for

    def index(self, i: int) -> Barrier:
        assert i == 0
        return self

    def settle(self) -> None:
        if self.arrived == self.count and self.bytes == 0:
            self.phase += 1
            self.arrived = 0
            self.machine.changed.notify_all()
        assert self.arrived <= self.count, "more arrivals than a phase has"


class Barriers:
    def __init__(self, machine: Program, count: int) -> None:
        self.shape = [count, 1]
        self.all = [Barrier(machine) for _ in range(count)]

    def index(self, i: int) -> Barrier:
        assert 0 <= i < len(self.all)
        return self.all[i]


class Program:
    """One program of a grid."""

    def __init__(
        self, number: Sequence[int], grid: Sequence[int], late: bool, slow: int = -1
    ) -> None:
        self.number, self.grid, self.late, self.slow = number, grid, late, slow
        self.changed = threading.Condition(threading.RLock())
        self.local = threading.local()  # products under way, of a warp group
        self.stores: list[Callable] = []
        self.failures: list[BaseException] = []

    # -- gl ----------------------------------------------------------------------------------

    def allocate(self, dtype: Any, shape: Any, _layout: Any = None) -> Any:
        if torch_dtype(dtype) == torch.int64:
            return Barriers(self, int(shape[0])) if len(shape) == 2 else Barrier(self)
        size = torch.Size([int(n) for n in shape]).numel() * torch_dtype(dtype).itemsize
        return Memory(torch.full((size,), 0xFF, dtype=torch.uint8), dtype, shape)

    def specialize(self, parts: Any, warps: Any, _registers: Any) -> None:
        assert len(warps) == len(parts) - 1
        threads = [
            threading.Thread(target=self.run, args=(*part, group), daemon=True)
            for group, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def run(self, fn: Callable, arguments: tuple, group: int) -> None:
        self.local.late = group == self.slow
        try:
            fn(*arguments)
            assert not self.under_way, "a warp group ends while its products are under way"
        except BaseException as failure:
            with self.changed:
                self.failures.append(failure)
                self.changed.notify_all()

    # -- products ----------------------------------------------------------------------------

    @property
    def under_way(self) -> list[Product]:
        if not hasattr(self.local, "products"):
            self.local.products = []
        return self.local.products

    def mma(self, a, b, acc, *, use_acc=True, is_async=False):
        assert is_async
        self.under_way.append(Product(a, b, acc, use_acc))
        return self.under_way[-1]

    def mma_wait(self, num_outstanding=0, deps=()):
        while len(self.under_way) > num_outstanding:
            self.under_way.pop(0).finish()
        found = tuple(x if x.tensor is None else Tile(x.tensor) for x in deps)
        return found[0] if len(found) == 1 else found

    # -- barriers and copies -----------------------------------------------------------------

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = count

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            with self.changed:
                barrier.arrived += count
                barrier.settle()

    def expect(self, barrier: Barrier, bytes: int, pred: Any = True) -> None:
        if pred:
            with self.changed:
                assert barrier.count, "not initialised"
                barrier.bytes += bytes
                barrier.arrived += 1

    def wait(self, barrier: Barrier, parity: int, pred: Any = True) -> None:
        if not pred:
            return
        if getattr(self.local, "late", False):
            time.sleep(0.004)

        def over() -> Any:
            # Also copies that another group asks for while this one waits.
            while barrier.copies:
                barrier.copies.pop(0)()
            return self.failures or barrier.phase & 1 != parity

        with self.changed:
            done = self.changed.wait_for(over, timeout=PATIENCE)
            assert done and not self.failures, "waits for ever"

    def load(self, x: Descriptor, coords: Any, barrier: Barrier, slot: Memory, pred=True) -> None:
        if not pred:
            return
        assert slot.shape == x.block_shape and torch_dtype(slot.dtype) == x.tensor.dtype

        def copy() -> None:
            part, box = x.part(coords)
            slot.tensor.zero_()
            slot.tensor[box] = part
            barrier.bytes -= slot.bytes.numel()
            barrier.settle()

        with self.changed:
            barrier.copies.append(copy)
            if not self.late:
                barrier.copies.pop()()
            self.changed.notify_all()

    def store(self, x: Descriptor, coords: Any, slot: Memory) -> None:
        assert slot.shape == x.block_shape and torch_dtype(slot.dtype) == x.tensor.dtype

        def copy() -> None:
            part, box = x.part(coords)
            part.copy_(slot.tensor[box])

        self.stores.append(copy)
        if not self.late:
            self.stores.pop()()

    def store_wait(self, pendings: int) -> None:
        with self.changed:
            while len(self.stores) > pendings:
                self.stores.pop(0)()


def _flat(t: Tensor) -> Tensor:
    """The memory from the first element of ``t`` on."""
    return t.as_strided((t.untyped_storage().nbytes() // t.itemsize - t.storage_offset(),), (1,))


def _addressed(ptr: Pointer, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The memory, places in it, and which of them count."""
    flat = _flat(ptr.memory)
    places = (torch.as_tensor(bare(x)) for x in (ptr.offset, mask))
    at, inside = torch.broadcast_tensors(*places)
    assert ((at >= 0) & (at < flat.numel()))[inside].all(), "outside of its memory"
    return flat, at, inside


def _store(ptr: Pointer, x: Tile, mask: Any = True) -> None:
    flat, at, inside = _addressed(ptr, mask)
    found = torch.as_tensor(bare(x)).to(flat.dtype)
    flat[at[inside]] = found.broadcast_to(at.shape)[inside]


def _load(ptr: Pointer, mask: Any = True, other: float = 0.0) -> Tile:
    flat, at, inside = _addressed(ptr, mask)
    found = flat[torch.where(inside, at, 0)]
    return Tile(torch.where(inside, found, torch.as_tensor(other, dtype=found.dtype)))


def _full(shape: Any, value: float, dtype: Any = None, layout: Any = None) -> Tile:
    return Tile(torch.full([int(n) for n in shape], value, dtype=torch_dtype(dtype)))


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, bool):
        found = a if condition else b
        return Int(found) if isinstance(found, int) else found
    return Tile(torch.where(*(torch.as_tensor(bare(x)) for x in (condition, a, b))))


def _extreme(of_tensors: Callable, of_integers: Callable) -> Callable:
    def chosen(a: Any, b: Any) -> Any:
        if not isinstance(a, Tile):
            return Int(of_integers(a, b))
        return Tile(of_tensors(a.tensor, torch.as_tensor(bare(b), dtype=a.tensor.dtype)))

    return chosen


def _atomic_add(ptr: Pointer, x: Tile, sem: str) -> None:
    flat, at, inside = _addressed(ptr, True)
    assert inside.all() and at.unique().numel() == at.numel() and x.tensor.dtype == flat.dtype
    flat[at] += x.tensor


def _rounded(x: Tile) -> Tile:
    """To the nearest 32-bit integer; what NaN, 0 on a GPU, becomes may not matter."""
    whole = x.tensor.double().round().nan_to_num(2.0**30).clamp(-(2**31), 2**31 - 1)
    return Tile(whole.to(torch.int32))


def _view(memory: Memory, dtype: Any, shape: Any, layout: Any) -> Memory:
    size = torch.Size([int(n) for n in shape]).numel() * torch_dtype(dtype).itemsize
    return Memory(memory.bytes[:size], dtype, shape)


def _language(program: Program) -> Any:
    """What stands for ``gl``."""
    names = dict(
        program_id=lambda axis: Int(program.number[axis]),
        num_programs=lambda axis: Int(program.grid[axis]),
        num_warps=lambda: Int(1),  # only layouts ask
        full=_full,
        minimum=_extreme(torch.fmin, min),
        to_tensor=lambda x: x,
        atomic_add=_atomic_add,
        exp=lambda x: Tile(bare(x).exp()),
        log=lambda x: Tile(bare(x).log()),
        rsqrt=lambda x: Tile(bare(x).rsqrt()),
        static_range=lambda *a: map(Int, range(*a)),
        arange=lambda a, b, layout=None: Tile(torch.arange(a, int(b))),
        zeros=lambda shape, dtype, layout=None: _full(shape, 0, dtype),
        where=_where,
        # As the hardware does, which passes over NaN.
        maximum=_extreme(torch.fmax, max),
        max=lambda x, axis: Tile(x.tensor.amax(axis)),
        sum=lambda x, axis: Tile(x.tensor.sum(axis)),
        log2=lambda x: Tile(x.tensor.log2()),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        load=_load,
        store=_store,
        allocate_shared_memory=program.allocate,
        warp_specialize=program.specialize,
    )
    layouts = (
        "NVMMASharedLayout",
        "SwizzledSharedLayout",
        "NVMMADistributedLayout",
        "BlockedLayout",
    )
    layouts += ("DotOperandLayout", "SliceLayout", "constexpr")
    layouts += ("bfloat16", "float32", "int32", "int64", "uint8", "uint32")
    names |= {name: getattr(real, name) for name in layouts}
    return types.SimpleNamespace(**names)


def _arguments(program: Program) -> dict[str, Any]:
    """What stands for the names that a kernel's file imports or defines."""
    return dict(
        gl=_language(program),
        exp2=lambda x: Tile(x.tensor.exp2()),
        before_next_wait=lambda x: x,
        rounded=_rounded,
        view=_view,
        begin=lambda behind: None,
        wait_for_launches_in_front=lambda: None,
        let_next_start=lambda: None,
        range=lambda *a: map(Int, range(*a)),
        thread_barrier=lambda: None,
        fence_async_shared=lambda: None,
        mbarrier=types.SimpleNamespace(
            init=program.init,
            arrive=program.arrive,
            expect=program.expect,
            wait=program.wait,
            MBarrierLayout=lambda: None,
        ),
        tma=types.SimpleNamespace(store_wait=program.store_wait),
        tma_load=program.load,
        tma_store=program.store,
        warpgroup_mma=program.mma,
        warpgroup_mma_wait=program.mma_wait,
    )


def _plain(jitted: JITFunction, instead: dict[str, Any], rebuilt: dict[Any, Callable]) -> Callable:
    """The function itself, and all that it calls, with other names."""
    if jitted not in rebuilt:
        fn = jitted.fn
        names = dict(fn.__globals__)
        rebuilt[jitted] = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__)
        for name, value in list(names.items()):
            if isinstance(value, JITFunction) and value.fn.__module__.startswith("forge"):
                names[name] = _plain(value, instead, rebuilt)
            elif isinstance(value, real.constexpr) and isinstance(value.value, int):
                names[name] = Int(value.value)
        names.update(instead)
    return rebuilt[jitted]


def run_program(
    kernel: JITFunction,
    number: Sequence[int],
    grid: Sequence[int],
    late: bool,
    instead: dict[str, Any],
    *args: Any,
    slow: int = -1,
    **options: Any,
) -> None:
    """Run one program of a grid; raises what goes wrong in any of its groups of warps."""
    program = Program(number, grid, late, slow)
    _plain(kernel, _arguments(program) | instead, {})(*args, **options)
    if program.failures:
        raise program.failures[0]
    assert not program.stores, "ends before its stores are complete"


class OnCPU:
    """Stands for a kernel, to be launched as it is; ``instead``: of more names in its files.

    ``backwards``: its programs run from the last to the first; ``slow``: which group of warps comes
    late to all its waits.
    """

    def __init__(
        self,
        kernel: JITFunction,
        late: bool,
        instead: dict[str, Any] | None = None,
        backwards: bool = False,
        slow: int = -1,
    ) -> None:
        self.kernel, self.late, self.instead = kernel, late, instead or {}
        self.backwards, self.slow = backwards, slow
        self.launched = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*arguments: Any, **options: Any) -> None:
            for option in ("num_warps", "maxnreg", "launch_pdl"):
                options.pop(option, None)
            self.launched += 1
            numbers = list(itertools.product(*map(range, grid)))
            for number in reversed(numbers) if self.backwards else numbers:
                run_program(
                    self.kernel,
                    number,
                    grid,
                    self.late,
                    self.instead,
                    *map(_argument, arguments),
                    slow=self.slow,
                    **{name: _argument(value) for name, value in options.items()},
                )

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        t = x.base.detach()
        t = t.as_strided(list(x.shape), list(x.strides), t.storage_offset())
        return Descriptor(t, x.block_shape, x.layout)
    if isinstance(x, Tensor):
        return Pointer(x.detach())
    return Int(x) if isinstance(x, int) else x
