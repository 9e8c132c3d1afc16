"""What the compiler makes of the kernels for Hopper, checked without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge.kernels import runtime

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def kernels():
    return compiled()


def compiled(*arguments):
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_kernel_spills(kernels):
    assert len(kernels) >= 86 and sum(name.endswith("int8") for name in kernels) >= 20
    spilled = {name: k for name, k in kernels.items() if k["stack"] or k["local"]}
    # Two thirds of a Hopper program's registers hold a tile and a unit's new states. For AdamW that
    # suffices; rules of more terms keep up to 26 numbers a thread elsewhere, of 256 a tile.
    rules = [f"{lay} {rule}" for rule in ("nadam", "radam", "adam") for lay in ("wide", "pair")]
    for name in [f"wgrad_update_hopper {rule} int8" for rule in rules]:
        assert kernels[name]["stack"] <= 104 and kernels[name]["local"] <= 60, name
        spilled.pop(name, None)
    # No spills: the library's way to reduce angles beyond 100,000 keeps a few numbers there.
    assert kernels["model rope_tables"]["stack"] <= 32
    spilled.pop("model rope_tables", None)
    assert not spilled


@pytest.mark.parametrize("architecture", ["80", "100"])
def test_portable_updates_compile_for_other_gpus(architecture):
    found = compiled(architecture)
    assert {name.split()[0] for name in found} == {"apply_rule", "update_rows", "wgrad_update"}
    assert len(found) >= 12
    for name, kernel in found.items():
        assert kernel["stack"] == kernel["local"] == 0, name
        # What a program of an A100 may have; smaller GPUs of that generation have 100 KB.
        assert kernel["shared"] <= 100 * 1024, name


def test_accesses_are_as_wide_as_they_can_be(kernels):
    """Lost alignment hints cost a factor of four once; nothing else would show it."""
    for name, kernel in kernels.items():
        # Those that copy by the tensor memory engine, one that is better off with 8 bytes, one that
        # spreads sines over threads, and one whose masks allow no more.
        narrow = any(part in name for part in (" long", "rope_tables", "sort_ids"))
        engine = name.startswith(("wgrad_update_hopper", "linear_hopper", "attention_hopper"))
        if not engine and not narrow:
            assert kernel["wide"] > 0, name


def test_kernels_that_start_early_touch_nothing_before_they_may(kernels):
    """And let the next one start no sooner: who is started early relies on it."""
    # The first chain and wait in ways of their own; of attention's for Hopper the code of worker
    # warps, which run once the others have waited, may lie in front; the last are told that weights
    # are older.
    late = ("wgrad", "attention backward", "attention_hopper")
    checked = [n for n in kernels if not n.startswith(late) and not n.endswith("prefetch")]
    assert len(checked) >= 40
    assert [name for name in checked if not kernels[name]["waits_first"]] == []


def test_products_prefetch_a_ring_of_weights_and_no_more(kernels):
    prefetching = [name for name in kernels if name.endswith("prefetch")]
    assert len(prefetching) >= 5
    for name in prefetching:
        assert kernels[name]["loads_before_wait"] == int(name.split()[3]), name


@pytest.mark.parametrize(
    ("capability", "hip", "early"),
    [((8, 9), None, False), ((9, 0), None, True), ((9, 4), "6", False)],
)
def test_what_is_launched_early(monkeypatch, capability, hip, early):
    class OnGPU:
        is_cuda = True

        def get_device(self):
            return 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    runtime._launches_early.cache_clear()
    options = runtime.early_launch(OnGPU())
    runtime._launches_early.cache_clear()
    assert options == (dict(PDL=True, launch_pdl=True) if early else dict(PDL=False))
    assert runtime.early_launch(torch.empty(1)) == dict(PDL=False)


def test_products_run_on_the_tensor_cores(kernels):
    for name, kernel in kernels.items():
        assert (kernel["products"] > 0) == name.startswith(
            ("wgrad", "attention", "linear_hopper")
        ), name


def test_products_of_attention_overlap_with_exponentials(kernels):
    """As many waits as there are written down: the compiler may wait behind every instruction."""
    for name, kernel in kernels.items():
        if name.startswith("attention_hopper"):
            # Of both groups of warps: forward before, twice in and behind the loop.
            written = 2 * (6 if "backward" in name else 4)
            assert kernel["product_waits"] == written < kernel["products"] / 3, name


def test_registers_and_shared_memory(kernels):
    for name, kernel in kernels.items():
        if name.startswith("wgrad_update_hopper") and " pair " in name:
            # Two programs an SM: 256 threads are paid for, of which four warps then take 232
            # registers each; a program takes 1 KB more than its own of 228 KB.
            assert kernel["registers"] == 128, name
            assert 2 * (kernel["shared"] + 1024) <= 228 * 1024, name
        elif name.startswith("wgrad_update_hopper") and " apart " in name:
            # 512 threads take all registers, then four warps 168 each and eight 160.
            assert kernel["registers"] == 128 and kernel["shared"] <= 227 * 1024, name
            assert kernel["stack"] == kernel["local"] == 0, name
        elif name.startswith("wgrad_update_hopper"):
            # 384 threads are paid for, of which eight warps then take 240 registers each; one
            # program an SM, of 228 KB.
            assert kernel["registers"] == 168 and kernel["shared"] == 196_996, name
        elif name.startswith("linear_hopper"):
            # One program an SM, which leaves registers for one of 128 threads, at least, of the
            # kernels around it, and 31 KB.
            columns = int(name.split()[2])
            assert kernel["registers"] <= {64: 64, 128: 96}[columns], name
            assert kernel["shared"] <= 197_000, name
            assert kernel["products"] in (4, 8), name  # one loop over slots, products of 16 terms
        elif name.startswith("attention_hopper"):
            # Two groups of four warps, one program an SM; forward leaves a third of its registers
            # to the kernels in front and behind.
            assert kernel["registers"] <= (255 if "backward" in name else 168), name
            assert kernel["shared"] <= 227 * 1024, name
        elif name.startswith("attention"):
            # Two programs of 128 threads on an SM, which takes 1 KB more for each.
            registers = 255 if "backward" in name else 160
            assert kernel["registers"] <= registers, name
            assert 2 * (kernel["shared"] + 1024) <= 228 * 1024, name
        elif name.startswith("model"):
            # Of the rotation's backward eight programs of 128 threads are to run on an SM; seven
            # where four parts are added up.
            rope = 72 if name.endswith("32 parts") else 64
            assert kernel["registers"] <= (rope if "rope backward" in name else 128), name
        elif name.startswith("wgrad_update"):
            assert kernel["registers"] <= 240 and kernel["shared"] <= 100 * 1024, name
        else:
            assert kernel["registers"] <= 72, name  # 7 programs of 128 threads an SM
