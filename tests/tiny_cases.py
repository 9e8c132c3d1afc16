"""The cases of forge-bench kernels at sizes for a CPU: for several test files."""

from __future__ import annotations

from forge.harness.kernel_bench import workload
from forge.harness.kernel_cases import model_cases
from forge.harness.update_cases import update_cases as cases_of_the_update

ORIGIN = dict(hardware="H200", torch="2", triton="3", date="2026-01-01", commit="abc")
NAME, SHAPE = workload(on_gpu=False)


def all_cases(on_gpu=False):
    return [*cases_of_the_update(NAME, SHAPE, on_gpu), *model_cases(NAME, SHAPE, on_gpu)]
