"""How a Linear hands its weight gradient to the optimizer without forming it.

:class:`ForgeLinear` is ``nn.Linear`` by class swap: parameters, names and ``isinstance`` stay. Its
backward computes the input gradient and passes the two factors of the weight gradient, the layer's
input and output gradient, to the weight's :class:`Slot`. The weight stays in the autograd graph, so
the engine still tells when its gradient is complete: all uses in the graph have been differentiated
and every input gradient has read the old weight. That moment triggers the update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from forge.deferred import AppliedGradient, DeferredGradient, refuse_second_backward
from forge.kernels.linear_auto import linear_backward, linear_forward
from forge.tied import SplitUpdate

# Inputs x [..., K] and output gradients dy [..., N] whose products dy^T x add up to a gradient, and
# the sum of their versions. Of a vector: parts x [P, K] whose rows add up to it; dy has no columns.
# An embedding is a product of one-hot rows: in place of dy it gives ids [...], and in place of x
# the gradient of its output.
Factors = list[tuple[Tensor, Tensor, int]]

_SLOTS: dict[int, weakref.ref[Slot]] = {}

# Looked up once: they run for every layer of every pass, and the host is what an eager step waits
# for.
_grad_enabled = torch.is_grad_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled
_current_task = torch._C._current_graph_task_id
_will_run = torch._C._will_engine_execute_node


class Slot:
    """A parameter's place in its optimizer: what a backward pass has collected for it so far.

    Args:
        param: the leaf parameter.
        name: for messages.
        salt: of its :class:`~forge.kernels.target.Target`.
        clock: the optimizer's clock that counts this parameter's steps.
        owner: the optimizer.
    """

    def __init__(self, param: nn.Parameter, name: str, salt: int, clock: Any, owner: Any) -> None:
        self.param = param
        self.owner = weakref.ref(owner)
        self.name = name
        self.salt = salt
        self.clock = clock
        self.updated = False
        self.shared = False  # by several modules: factors wait until all have been differentiated
        self.embeds = False  # an embedding hands rows to it
        self.split: SplitUpdate | None = None  # while a step is captured
        self.target: Any = None
        self.stream: int | None = None
        self.node: Any = None
        self.factors: Factors = []
        self.deferred = False
        self._hook: Any = None
        self._applied: Any = None
        self.task = -1
        key = id(param)
        _SLOTS[key] = weakref.ref(self, lambda _: _SLOTS.pop(key, None))

    def attach(self, queue: Any) -> None:
        """Call ``queue.complete(self)`` whenever a backward pass has completed this gradient.

        The parameter must require a gradient. Both references back are weak: the autograd node
        lives in C++, where Python's cycle collector does not look.
        """
        slot_ref, queue_ref = weakref.ref(self), weakref.ref(queue)

        def hook(_grad_inputs: Any, _grad_outputs: Any) -> None:
            slot, queue = slot_ref(), queue_ref()
            if slot is not None and queue is not None:
                queue.complete(slot)

        if self._hook is not None:
            self._hook.remove()
        # AccumulateGrad runs once a backward, after every use of the parameter has contributed. The
        # tensor's own post-accumulate hook is not called when no use returned a gradient tensor.
        self.node = get_gradient_edge(self.param).node
        self._hook = self.node.register_hook(hook)

    def renew(self, queue: Any) -> None:
        """Listen anew, on a node that belongs to the current stream.

        The old node goes with the last graph that holds it.
        """
        if self._hook is not None:
            self._hook.remove()
        self.node = self._hook = None
        self.attach(queue)

    def attached(self) -> bool:
        """Whether the node is still the parameter's.

        Autograd drops it when the parameter's dtype, device or storage is exchanged.
        """
        if self.node is None or not self.param.requires_grad:
            return False
        return get_gradient_edge(self.param).node is self.node

    def detach(self) -> None:
        """Stop listening; layers of this weight behave as plain ``nn.Linear`` again."""
        if self._hook is not None:
            self._hook.remove()
        self.node = self._hook = None
        if slot_of(self.param) is self:
            del _SLOTS[id(self.param)]

    def collect(self, x: Tensor, dy: Tensor, rows: tuple[int, int] | None = None) -> bool:
        """Keep ``dW = dy^T x`` as its factors. False: the caller must return the gradient itself.

        Args:
            x: [..., K] input of the layer; of an embedding the gradient of its output.
            dy: [..., N] gradient of its output; of an embedding the ids [...], negative ones for
                tokens that do not count.
            rows: where the rows of the weight begin and end that ``dy`` has columns of, if they are
                not all: taken only while :attr:`split` is set, from the last rows to the first.
        """
        if rows is not None and self.split is None:
            return False
        param = self.param
        if self.owner() is None or param._backward_hooks or param._post_accumulate_grad_hooks:
            return False
        if not param.is_contiguous():
            return False  # laid out anew since its layer was fused; the fused kernel walks rows
        try:
            if not _will_run(self.node):
                # Nobody wants this gradient (torch.autograd.grad of something else), or autograd
                # has another node for the parameter by now, which nobody listens to yet.
                return self.attached()
        except RuntimeError:
            return False  # torch.autograd.grad asks for this very weight
        task = _current_task()
        if task != self.task and not self.deferred:
            # What an earlier backward left behind was abandoned by an exception.
            self.factors, self.task = [], task
        if self.split is not None and self.split.take(x, dy, rows):
            return True
        if rows is not None:
            return False
        if self.shared and dy.is_floating_point():
            # They are held until the last use: not if the gradient is smaller.
            held = sum(t.nbytes for pair in self.factors for t in pair[:2])
            if held + x.nbytes + dy.nbytes > param.nbytes:
                return False
        if dy.is_cuda:
            self.stream = torch._C._cuda_getCurrentRawStream(dy.get_device())
        self.factors.append((x, dy, x._version + dy._version))
        return True

    def mark_applied(self) -> None:
        """Let ``param.grad`` say, until the end of the step, that it was applied."""
        try:
            self.param.grad = self._applied
        except (RuntimeError, TypeError):
            self._applied = None  # made for another dtype or device
        if self._applied is None:
            self.param.grad = self._applied = AppliedGradient(self)

    def take(self, grad: DeferredGradient) -> Tensor | None:
        """What to update from: None for the factors alone, else a dense gradient."""
        if grad.dense is not None or not grad.factors:
            self.factors = []
            return grad.form()
        self.factors = grad.factors
        return None


def slot_of(param: Tensor | None) -> Slot | None:
    """The slot of ``param``, when an optimizer of this package holds it."""
    reference = _SLOTS.get(id(param))
    slot = reference() if reference is not None else None
    return slot if slot is not None and slot.param is param else None


def collector(param: Tensor | None) -> Callable[[Tensor], bool] | None:
    """Takes parts [P, K], fp32, whose rows add up to the gradient of the vector ``param`` [K]."""
    slot = slot_of(param)
    # With `update="step"` a vector's gradient is stored, as it is small.
    if slot is None or slot.node is None or slot.deferred:
        return None
    return lambda parts: slot.collect(parts, parts[:, :0])


def refuse_create_graph(name: str) -> NoReturn:
    """Raise the RuntimeError of a backward that is to be differentiated."""
    raise RuntimeError(
        f"create_graph=True: the weight {name!r} is updated inside backward, so its backward "
        "cannot be differentiated; use torch.optim.AdamW for this model"
    )


def saved(ctx: Any, slot: Slot) -> tuple[Tensor, ...]:
    """The saved tensors of a node; if an update has changed one since, the error says so."""
    try:
        return ctx.saved_tensors
    except RuntimeError:  # changed in place, by whom autograd cannot say; or freed
        if slot.updated:
            refuse_second_backward(slot.name)
        raise


class LinearFunction(torch.autograd.Function):
    """``y = x W^T + b`` whose backward gives ``x`` and ``dy`` to the weight's slot, not ``dW``."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, slot: Slot, unsummed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slot = slot
        same = weight if weight.dtype == x.dtype else weight.to(x.dtype)
        if bias is None:
            # Between two norms: the first one's kernel lies between this one and any update.
            prefetch = unsummed and same is weight
            return linear_forward(x, same, prefetch=prefetch, unsummed=unsummed)
        ctx.bias_dtype = bias.dtype
        y = F.linear(x, same, bias.to(x.dtype))
        # With a bias it is a view of a matrix, which nobody may change in place if it comes from a
        # custom function: `nn.ReLU(inplace=True)`, `y += residual`.
        return y.data if y._is_view() else y

    @staticmethod
    def backward(ctx, dy: Tensor):
        slot = ctx.slot
        if _grad_enabled():
            refuse_create_graph(slot.name)
        x, weight = saved(ctx, slot)
        need_x, need_weight, need_bias, _, _ = ctx.needs_input_grad
        dx = dw = db = None
        if need_x:
            # Between the weight's last update and this pass lies the forward pass.
            same = weight if weight.dtype == dy.dtype else weight.to(dy.dtype)
            dx = linear_backward(dy, same, prefetch=same is weight)
        if need_weight and not slot.collect(x, dy):
            dw = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            dw = dw.to(weight.dtype)
        if need_bias:
            db = dy.reshape(-1, dy.shape[-1]).sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None, None


# `Function.apply` without its checks for function transforms, which `forward` below makes.
_linear = super(torch.autograd.Function, LinearFunction).apply


class FusedLayer:
    """What layers have in common that hand their weight's gradient to its slot."""

    plain: type[nn.Module]  # the class of their copies, which have no slot
    weight: Tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        # In the form of protocol 1, which may name another class than the object's.
        build, args, *rest = cast(tuple, super().__reduce_ex__(1))
        return build, tuple(self.plain if arg is type(self) else arg for arg in args), *rest

    def traced(self, input: Tensor) -> Tensor:
        """The output while the compiler traces, which has no side effects: no slots here."""
        training = torch.is_grad_enabled() and self.weight.requires_grad
        # Not is_exporting(), which up to torch 2.11 is always true to the compiler.
        if training and not torch.compiler._is_exporting_flag:
            from forge.graph_break import graph_break

            return graph_break(cast(nn.Module, self), input)
        return self.plain.forward(cast(nn.Module, self), input)


def active_slot(weight: Tensor | None, input: Any) -> Slot | None:
    """The slot that takes the weight's gradient in this call; None: compute as a plain layer."""
    reference = _SLOTS.get(id(weight))
    slot = reference() if reference is not None else None
    if (
        weight is None  # pruned or parametrized
        or slot is None
        or slot.param is not weight
        or slot.node is None
        or not (weight.requires_grad and _grad_enabled())
        or weight._backward_hooks
        or weight._post_accumulate_grad_hooks
        or _transforms_active()
        or forward_ad._current_level >= 0
        or not isinstance(input, Tensor)  # a proxy of torch.fx
        or _tracing_state() is not None
    ):
        return None
    return slot


class ForgeLinear(FusedLayer, nn.Linear):
    """An ``nn.Linear`` whose weight gradient goes to the optimizer that holds its weight.

    Without such an optimizer, with a frozen weight, under ``no_grad``, function transforms,
    forward-mode differentiation, ``torch.export``, ``torch.jit.trace`` or ``torch.fx``, or with
    gradient hooks on the weight it is a plain ``nn.Linear``. Its copies, also by pickle, are
    ``nn.Linear``; ``torch.jit.script`` takes only those.
    """

    plain = nn.Linear

    def forward(self, input: Tensor, unsummed: bool = False) -> Tensor:
        """``x W^T + b``; ``unsummed`` as in :func:`forge.kernels.linear_auto.linear_forward`."""
        if torch.compiler.is_dynamo_compiling():
            return self.traced(input)
        # From the dict: an attribute of a module costs five times as much, in every layer.
        parameters = self._parameters
        weight = parameters.get("weight")
        # A pruned or parametrized one is no parameter.
        bias = parameters["bias"] if "bias" in parameters else self.bias
        slot = active_slot(weight, input)
        if slot is None or weight is None:
            return F.linear(input, self.weight, self.bias)
        if _any_autocast() and _autocasts(input):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        elif input.dtype != weight.dtype:
            return F.linear(input, weight, bias)  # raises torch's own dtype error
        return _linear(input, weight, bias, slot, unsummed)


def _autocasts(input: Tensor) -> bool:
    """Whether autocast would convert ``input`` for a linear layer: all floats but fp64."""
    return (
        torch.is_autocast_enabled(input.device.type)
        and input.is_floating_point()
        and input.dtype != torch.float64
    )


def fuse_linears(model: nn.Module) -> list[nn.Linear]:
    """Turn the model's ``nn.Linear`` layers into :class:`ForgeLinear`, in place; returns them.

    Left as they are: subclasses (they may not compute ``x W^T``), and layers whose weight has no
    slot, is empty or not contiguous. A weight that several modules share (a tied head) needs the
    sum of several gradients: its slot keeps factors while they are smaller than the gradient.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners[id(param)] = owners.get(id(param), 0) + 1
    fused = []
    for module in model.modules():
        if type(module) is not nn.Linear and type(module) is not ForgeLinear:
            continue
        weight = module.weight
        slot = slot_of(weight)
        if slot is not None and weight.is_contiguous() and weight.numel():
            slot.shared = owners[id(weight)] > 1
            module.__class__ = ForgeLinear
            fused.append(module)
    return fused


def unfuse(layers: list[nn.Module]) -> None:
    """Make them plain layers again, in place, but for those that another optimizer fused since."""
    for layer in layers:
        slot = slot_of(layer._parameters.get("weight"))
        if isinstance(layer, FusedLayer) and (slot is None or slot.owner() is None):
            layer.__class__ = layer.plain  # type: ignore[assignment]
    layers.clear()
