"""What the compiler makes of the kernels for Hopper, checked without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def kernels():
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_kernel_spills(kernels):
    assert len(kernels) >= 73 and sum(name.endswith("int8") for name in kernels) >= 20
    spilled = {name: k for name, k in kernels.items() if k["stack"] or k["local"]}
    # Two thirds of a Hopper program's registers hold a tile and a unit's new states. For AdamW that
    # suffices; rules of more terms keep up to 26 numbers a thread elsewhere, of 256 a tile.
    rules = [f"{pair}{rule}" for rule in ("nadam", "radam", "adam") for pair in ("", "pair ")]
    for name in [f"wgrad_update_hopper {rule} int8" for rule in rules]:
        assert kernels[name]["stack"] <= 104 and kernels[name]["local"] <= 60, name
        spilled.pop(name, None)
    assert not spilled


def test_accesses_are_as_wide_as_they_can_be(kernels):
    """Lost alignment hints cost a factor of four once; nothing else would show it."""
    for name, kernel in kernels.items():
        # Those that copy by the tensor memory engine, and one that is better off with 8 bytes.
        if not name.startswith("wgrad_update_hopper") and "rope backward" not in name:
            assert kernel["wide"] > 0, name


def test_products_run_on_the_tensor_cores(kernels):
    for name, kernel in kernels.items():
        assert (kernel["products"] > 0) == name.startswith(("wgrad", "attention")), name


def test_registers_and_shared_memory(kernels):
    for name, kernel in kernels.items():
        if name.startswith("wgrad_update_hopper") and " pair " in name:
            # Two programs an SM: 256 threads are paid for, of which four warps then take 232
            # registers each; a program takes 1 KB more than its own of 228 KB.
            assert kernel["registers"] == 128, name
            assert 2 * (kernel["shared"] + 1024) <= 228 * 1024, name
        elif name.startswith("wgrad_update_hopper"):
            # 384 threads are paid for, of which eight warps then take 240 registers each; one
            # program an SM, of 228 KB.
            assert kernel["registers"] == 168 and kernel["shared"] == 196_996, name
        elif name.startswith("attention"):
            # Two programs of 128 threads on an SM, which takes 1 KB more for each.
            registers = 255 if "backward" in name else 160
            assert kernel["registers"] <= registers, name
            assert 2 * (kernel["shared"] + 1024) <= 228 * 1024, name
        elif name.startswith("model"):
            # Of the rotation's backward eight programs of 128 threads are to run on an SM.
            assert kernel["registers"] <= (64 if "rope backward" in name else 128), name
        elif name.startswith("wgrad_update"):
            assert kernel["registers"] <= 240 and kernel["shared"] <= 100 * 1024, name
        else:
            assert kernel["registers"] <= 72, name  # 7 programs of 128 threads an SM
