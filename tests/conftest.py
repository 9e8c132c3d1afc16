"""Kernels run through Triton's interpreter on the CPU and as they are on a GPU."""

from __future__ import annotations

import os

# Before torch is imported, and for the processes that tests start. Our tensors are small: a second
# thread gains nothing, and on a busy machine each operator waits for it. On two cores with a load
# of 6: test_train_step.py 1.5 s for 40, test_optimize.py 40 s for 130, test_model_kernels.py 57 s
# for 82.
os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    # Triton decides when a kernel is decorated: it must be set while the kernel files are imported.
    os.environ["TRITON_INTERPRET"] = "1"
import forge  # noqa: E402, F401
from forge.kernels import runtime  # noqa: E402

# Neither the rest of the suite nor the processes it starts should interpret anything.
os.environ.pop("TRITON_INTERPRET", None)
runtime.interpret_cpu = False


def pytest_configure(config):
    # Files by name: xdist would begin with those of many tests, which are short, and end with one
    # worker at the few that take minutes.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _poisoned_and_seeded():
    """Fresh seeds, NaN in memory that nobody wrote, and the threads of the start again."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


@pytest.fixture
def interpreter(monkeypatch):
    """Every kernel through Triton's interpreter, where there is no GPU."""
    if not runtime.INTERPRETED:
        pytest.skip("the interpreter is for machines without a GPU")
    monkeypatch.setattr(runtime, "interpret_cpu", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # triton asks again while a kernel runs
    with np.errstate(divide="ignore"):  # as on a GPU: kernels take the logarithm of 0
        yield


@pytest.fixture(
    params=["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request):
    """Where kernels run: plain torch, Triton's interpreter, or Triton on a GPU."""
    if request.param == "interpreter":
        request.getfixturevalue("interpreter")
    return torch.device("cuda" if request.param == "cuda" else "cpu")
