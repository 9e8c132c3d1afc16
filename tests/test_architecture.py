"""The house: kernels <- optim <- forge <- harness, beside other people's `kernels` package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("kernels", "optim", "forge", "harness")


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "forge":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "forge"


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer):
    files = sorted((ROOT / layer).glob("*.py"))
    assert files
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for path in files:
        for module in imports(path):
            assert module.split(".")[0] not in ("kernels", "optim", "harness"), f"{path}: {module}"
            # The version has no layer: everybody may say which one it is.
            if module.startswith("forge._version"):
                continue
            assert layer_of(module) in (None, *allowed), f"{path} imports {module}"


def test_folders_are_namespace_packages_behind_relative_links():
    for name in ("kernels", "optim", "harness"):
        link = ROOT / "forge" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name
        assert not (ROOT / name / "__init__.py").exists(), "would shadow other people's package"


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_models_import_from_the_repository_root():
    out = run("from transformers import Qwen3ForCausalLM as M; print(M.__name__)")
    assert out.strip() == "Qwen3ForCausalLM"


def test_imports_and_trains_without_triton_and_without_gpu():
    out = run(
        """
import sys
sys.modules["triton"] = None
import torch
from torch import nn
from forge import ForgeAdamW
net = nn.Linear(3, 2)
optimizer = ForgeAdamW(net, lr=0.1)
before = net.weight.detach().clone()
net(torch.ones(1, 3)).sum().backward()
optimizer.step()
assert not torch.equal(net.weight, before)
print("trained", "transformers" in sys.modules, "pandas" in sys.modules)
""",
        CUDA_VISIBLE_DEVICES="",
    )
    assert out.split() == ["trained", "False", "False"]


def test_registry_and_command_line_import_without_any_rival():
    run(
        """
import sys
for name in ("bitsandbytes", "flashoptim", "galore_torch", "apollo_torch", "optimi",
             "lomo_optim", "torchao", "liger_kernel", "triton"):
    sys.modules[name] = None
import torch
compiler = "torch._dynamo" in sys.modules
from forge.optim.registry import REGISTRY
import forge.harness.cli
assert len(REGISTRY) > 10
assert ("torch._dynamo" in sys.modules) == compiler, "as slow to import as all of torch"
"""
    )
