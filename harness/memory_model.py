"""Peak memory of a training step, predicted from the model's shape and the method's footprint.

The peak is the largest of four moments, each on top of weights, states and workspaces:

- ``loss``: everything saved for backward, and the copies of the logits that the loss makes;
- ``head``: the same, with the gradient of the logits and the head's weight gradient;
- ``backward``: its end, when stored gradients are complete. A tied weight then has the gradients of
  its two uses and, unless one can be added in place, their sum;
- ``step``: stored gradients and the temporaries of the update.

Weights and activations are bf16. Scalars a token (norms, attention) are left out: under 1 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.harness.shapes import Shape
from forge.kernels.wgrad_auto import SCRATCH_ELEMENTS
from forge.optim.footprint import FUSED, RELEASED, STORED, Footprint

BF16, FP32 = 2, 4
# cuBLAS takes 32 MiB a handle on Hopper: one in the forward thread, one in backward's, and one for
# cublasLt. A captured graph has its own beside those of the warm-up, which `forge.TrainStep` frees.
WORKSPACES, WORKSPACE_BYTES = 3, 32 * 2**20
# What the loss holds at its peak, bytes a logit. Liger's works on an fp32 copy in place, beside the
# bf16 logits; PyTorch's has log-probabilities, their gradient and that of the logits, all fp32.
# This package's writes the gradient over the bf16 logits, or forms them in slices.
LOGIT_BYTES = {
    "liger": BF16 + FP32,
    "hf": 3 * FP32,
    "torch": 3 * FP32,
    "liger+flce": 0,
    "forge": BF16,
}
# torch.compile computes the loss from the bf16 logits, and the MLP's activation again.
COMPILED_LOGIT_BYTES, COMPILED_MLP_SAVED = BF16, 3
FORMS_HEAD_IN_LOSS = "liger+flce"
# Of gate, up, the activation and the input of the last linear, how many the MLP saves: Liger
# computes the activation again, this package that input too.
MLP_SAVED = {"liger": 3, "hf": 4, "torch": 4, "liger+flce": 3, "forge": 2}


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak, by what holds them; ``moment`` says when that is."""

    moment: str
    weights: float
    states: float
    gradients: float
    activations: float
    logits: float
    temporaries: float
    workspaces: float

    @property
    def peak(self) -> float:
        """Their sum."""
        held = self.weights + self.states + self.gradients + self.activations
        return held + self.logits + self.temporaries + self.workspaces


def saved_bytes(shape: Shape, kernels: str, compiled: bool = False) -> float:
    """Bytes a token that one layer saves for backward: first what its linears and attention read.

    Raises:
        KeyError: ``kernels`` is not one of :data:`LOGIT_BYTES`.
    """
    rotated = shape.q_width + shape.kv_width
    # Queries, keys, values and output of attention (which is the input of a linear).
    saved = BF16 * (rotated + shape.kv_width)
    saved += BF16 * shape.q_width
    if kernels != "forge":  # which has the norms' backward make them again
        saved += BF16 * 2 * shape.hidden
    # Norms save their input; transformers' save it in fp32, and their result before the weight.
    normed = shape.norms * shape.hidden + (rotated if shape.qk_norm else 0)
    saved += normed * (BF16 + FP32 if kernels == "hf" else BF16)
    mlp = min(COMPILED_MLP_SAVED, MLP_SAVED[kernels]) if compiled else MLP_SAVED[kernels]
    return saved + BF16 * shape.intermediate * mlp


def estimate(
    shape: Shape, batch: int, seq: int, footprint: Footprint, kernels: str, execution: str
) -> Estimate:
    """The peak of a step of ``batch`` sequences of ``seq`` tokens.

    Args:
        kernels, execution: as in :class:`~forge.harness.rows.Row`.

    Raises:
        KeyError: the memory of ``kernels`` is not modelled.
    """
    tokens, kind = batch * seq, footprint.gradients
    weights = float(BF16 * shape.numel)
    states = sum(p.count * footprint.state(p.dims, p.hidden, BF16) for p in shape.parameters)
    table = float(BF16 * shape.head.weights)
    compiled = execution.startswith("compile")
    activations = tokens * shape.layers * saved_bytes(shape, kernels, compiled)
    width = min(COMPILED_LOGIT_BYTES, LOGIT_BYTES[kernels]) if compiled else LOGIT_BYTES[kernels]
    logits, logit_gradient = float(tokens * shape.vocab * width), 0.0
    in_loss = kernels == FORMS_HEAD_IN_LOSS
    if not in_loss:
        logit_gradient = tokens * shape.vocab * float(BF16)
    # `forge.TrainStep` updates a tied weight from the gradient of the logits at once.
    ours = kind == FUSED and execution == "cuda_graph"
    if kernels == "forge":
        from forge import qwen3
        from forge.kernels.qkv_attention import KEPT_TOKENS

        kept, part = qwen3.LOGITS_BYTES, qwen3.SLICE_BYTES
        if ours and shape.tied:
            kept = part = qwen3.CAPTURED_LOGITS_BYTES
        if logits > kept:
            logits = logit_gradient = float(part)
        if tokens > KEPT_TOKENS and seq <= qwen3.SHORT:  # rotated queries and keys come again
            activations -= tokens * shape.layers * BF16 * (shape.q_width + shape.kv_width)

    # gradients, activations, logits, temporaries
    moments = {"loss": (table if in_loss else 0.0, activations, logits, 0.0)}
    if kind == FUSED:
        # A tied head's factors wait for the embedding's rows, unless its gradient is smaller.
        wait = shape.tied and not in_loss and logit_gradient <= table and not ours
        head = table if in_loss or shape.tied and not wait and not ours else 0.0
        left = (head if shape.tied else 0.0, 0.0, logit_gradient if wait else 0.0)
        moments["head"] = (head, activations, logit_gradient, 0.0)
        scratch = float(BF16 * SCRATCH_ELEMENTS)
        moments["backward"] = (*left, scratch + footprint.queued_bytes)
    else:
        moments["head"] = (table, activations, logit_gradient, 0.0)
        # The embedding's gradient is complete last; a tied weight's sum is made in place only when
        # the head's gradient is no view.
        extra = (table if in_loss else 2 * table) if shape.tied else 0.0
        held = weights if kind == STORED else table
        moments["backward"] = (held, 0.0, 0.0, extra + footprint.queued_bytes)
    if kind == STORED:
        step = footprint.step_bytes * max(p.numel for p in shape.parameters)
        step += footprint.step_bytes_all * shape.numel
        moments["step"] = (weights, 0.0, 0.0, step)
    if kind == RELEASED:
        step = footprint.step_bytes * max(p.numel for p in shape.parameters)
        moments["step"] = (0.0, 0.0, 0.0, step)
    moment = max(moments, key=lambda name: sum(moments[name]))
    handles = WORKSPACES * (2 if execution.endswith("cuda_graph") and not ours else 1)
    return Estimate(moment, weights, states, *moments[moment], float(handles * WORKSPACE_BYTES))
