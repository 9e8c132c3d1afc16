"""Compiles every kernel for sm_90, without a GPU, and prints what came out, as JSON.

With the number of another architecture (80, 100) as its argument: the portable updates for that.

A script, not a test: kernels must be imported outside Triton's interpreter, which the tests use.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from compile_attention_hopper import attention_hopper_kernels
from forge.kernels import (
    apply_rule,
    attention,
    attention_backward,
    attention_fixed_point,
    attention_tiles,
    column_sum,
    hopper_pair,
    hopper_ring,
    linear_auto,
    linear_cross_entropy,
    linear_hopper,
    qk_norm_rope,
    qk_norm_rope_backward,
    rms_norm,
    rope_tables,
    row_update,
    rows_apart,
    sort_ids,
    swiglu,
    target,
    wgrad_update,
    wgrad_update_hopper,
    wgrad_update_hopper_int8,
)
from forge.optim import rules

ARCHITECTURE = int(sys.argv[1]) if len(sys.argv) > 1 else 90
GPU = GPUTarget("cuda", ARCHITECTURE, 32)
EARLY = ARCHITECTURE >= 90  # as forge.kernels.runtime decides
LAYOUTS = ("wide", "pair", "apart")  # of the fused updates for Hopper, the last one with codes
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def usage(source: Any, options: dict[str, Any]) -> dict[str, int]:
    """Registers at launch, stack bytes, accesses to local memory (spills), shared memory, ..."""
    compiled = triton.compile(source, target=GPU, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()

        def output(tool: str, *options: str) -> str:
            command = [str(TOOLS / tool), *options, cubin.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        resources = output("cuobjdump", "-res-usage")
        # What `cuobjdump -sass` runs, without encodings and an analysis of branches: a third less.
        assembly = output("nvdisasm", "-c", "-ndf")
    return {
        "registers": int(re.search(r"REG:(\d+)", resources)[1]),
        "stack": int(re.search(r"STACK:(\d+)", resources)[1]),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", assembly)),
        "wide": len(re.findall(r"(?:LDG|STG|LDGSTS)\.E[.A-Z]*\.128", assembly)),
        "products": len(re.findall(r"\bHGMMA\b", assembly)),
        "product_waits": len(re.findall(r"\bWARPGROUP\.DEPBAR\b", assembly)),
        "shared": compiled.metadata.shared,
        "waits_first": _waits_first(assembly),
        "loads_before_wait": _loads_before_wait(assembly),
    }


def kernel_usage(
    kernel: Any,
    signature: dict[str, Any],
    constants: dict[str, Any],
    aligned: list[tuple[int, ...]],
    options: dict[str, Any],
) -> dict[str, int]:
    """:func:`usage` of a Triton kernel; ``aligned``: arguments that are multiples of 16."""
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(n),): value for n, value in constants.items()},
        {position: [["tt.divisibility", 16]] for position in aligned},
    )
    return usage(source, options)


def _waits_first(assembly: str) -> bool:
    """Whether a kernel touches no memory before the one in front has ended.

    ACQBULK waits for it, PREEXIT lets the next one start; both once, in this order.
    """
    memory = r"\b(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UTMA\w+|ACQBULK|PREEXIT)\b"
    return re.findall(memory, assembly)[:2] == ["ACQBULK", "PREEXIT"]


def _loads_before_wait(assembly: str) -> int:
    """How much the tensor memory engine loads before the kernel in front has ended; -1: more."""
    memory = r"\b(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UTMA\w+|ACQBULK|PREEXIT)\b"
    found = re.findall(memory, assembly)
    before = found[: found.index("ACQBULK")] if "ACQBULK" in found else found
    return len(before) if set(before) <= {"UTMALDG"} else -1


def rows_kernel(rule: Any, states: str) -> dict[str, int]:
    """The second update of a tied weight's looked-up rows."""
    kernel = rows_apart._update_rows_kernel
    names, count = kernel.arg_names, len(rule.states)
    signs = {name: "*u8" if name in rule.nonnegative else "*i8" for name in rule.states}
    stored = tuple(signs.values()) if states == "int8" else ("*bf16",) * count
    scales = ("*u8",) * count if states == "int8" else ()
    types = {
        **dict.fromkeys(("state_ptrs", "old_state_ptrs"), stored),
        **dict.fromkeys(("scale_ptrs", "old_scale_ptrs"), scales),
        **{"product_ptr": "*fp32", "ids_ptr": "*i64", "order_ptr": "*i64"},
        **{"scalars_ptr": "*fp32", "seed_ptr": "*i32"},
    }
    constants = dict(
        RULE=rule.update.triton,
        SCALARS=rule.scalar_count,
        STOCHASTIC=True,
        BLOCK_T=row_update.TOKENS,
        BLOCK_C=target.BLOCK if states == "int8" else 256,
        PDL=EARLY,
    )
    types |= dict.fromkeys(constants, "constexpr")
    signature = {n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in names}
    aligned: list[tuple[int, ...]] = []
    for i, (n, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            aligned += [(i, j) for j in range(len(kind))]
        elif n not in ("tokens", "salt", *constants):
            aligned.append((i,))
    return kernel_usage(
        kernel, signature, constants, aligned, {"num_warps": 1, "launch_pdl": EARLY}
    )


def keep_kernel(states: str) -> dict[str, int]:
    """What keeps a tied weight's looked-up rows, of bf16 or of 8-bit states."""
    kernel = rows_apart._keep_rows_kernel
    names, tile = kernel.arg_names, dict(rows_apart._KEEP)
    options = {"num_warps": tile.pop("num_warps"), "launch_pdl": True}
    stored = ("*bf16", *(("*i8", "*u8") if states == "int8" else ("*bf16", "*bf16")))
    scales = ("*u8", "*u8") if states == "int8" else ()
    types = {
        **dict.fromkeys(("stored", "kept"), stored),
        **dict.fromkeys(("scales", "kept_scales"), scales),
        **dict.fromkeys(("ids_ptr", "sorted_ptr", "order_ptr"), "*i64"),
    }
    constants = dict(COUNT=True, BLOCK_T=256, BLOCK_C=1024, BLOCK_S=8, PDL=True, **tile)
    types |= dict.fromkeys(constants, "constexpr")
    signature = {n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in names}
    aligned: list[tuple[int, ...]] = []
    for i, (n, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            aligned += [(i, j) for j in range(len(kind))]
        elif n not in ("tokens", *constants):
            aligned.append((i,))
    return kernel_usage(kernel, signature, constants, aligned, options)


def table_kernel(
    kernel: Any,
    rule: Any,
    constants: dict[str, Any],
    options: dict,
    states: str = "bf16",
    operands: str = "*bf16",
) -> dict:
    """A kernel of pointer tables; all but the states, which may be int8, of type ``operands``."""
    names = kernel.arg_names
    count = len(rule.states)
    signs = {name: "*u8" if name in rule.nonnegative else "*i8" for name in rule.states}
    types = {
        "table_ptr": "*i64",
        "scalars_ptr": "*fp32",
        "seed_ptr": "*i32",
        "state_ptrs": tuple(signs.values()) if states == "int8" else ("*bf16",) * count,
        "scale_ptrs": ("*u8",) * count if states == "int8" else (),
    }
    constants |= dict(
        RULE=rule.update.triton, SCALARS=rule.scalar_count, STOCHASTIC=True, ALIGN=16, CAPACITY=64
    )
    signature = {n: "constexpr" if n in constants else types.get(n, operands) for n in names}
    tuples = ("state_ptrs", "scale_ptrs")
    aligned = [(names.index(n),) for n in names if n not in constants and n not in tuples]
    aligned += [(names.index(n), j) for n in tuples for j in range(len(types[n]))]
    return kernel_usage(kernel, signature, constants, aligned, options)


def model_kernel(
    kernel: Any, tile: dict[str, int], others: dict[str, str] | None = None, **constants: Any
) -> dict[str, int]:
    """A kernel of the model; all that is not sized by tokens a multiple of 16.

    Tensors are bf16, but for ``others``: types by name.
    """
    names = kernel.arg_names
    tile = dict(tile)
    options = {"num_warps": tile.pop("num_warps"), "launch_pdl": True}
    constants |= tile | {"PDL": True}
    types = {
        "parts_ptr": "*fp32",
        "lse_ptr": "*fp32",
        "target_ptr": "*fp32",
        "count_ptr": "*fp32",
        "dloss_ptr": "*fp32",
        "labels_ptr": "*i64",
        "table_ptr": "*i64",
        "ids_ptr": "*i64",
        "order_ptr": "*i64",
        "sorted_ptr": "*i64",
        "positions_ptr": "*i64",
        "inv_freq_ptr": "*fp32",
        "eps": "fp32",
        "scaling": "fp32",
        **(others or {}),
    }
    signature = {
        n: "constexpr" if n in constants else types.get(n, "*bf16" if n.endswith("_ptr") else "i32")
        for n in names
    }
    free = {"rows", "T", "eps", "scaling", "ignore_index", "first", "count", "tokens", *constants}
    aligned = [(i,) for i, n in enumerate(names) if n not in free]
    return kernel_usage(kernel, signature, constants, aligned, options)


def model_kernels() -> dict[str, dict[str, int]]:
    """Of Qwen3-0.6B and, where rows are wider, Qwen3-8B."""
    found = {}
    for width in (128, 1024, 4096):
        tile, larger = rms_norm._tile(width), rms_norm._tile(width, 4096)
        for parts in (1, 4):
            name = f"{width}{' parts' * (parts > 1)}"
            found[f"model rms_norm {name}"] = model_kernel(
                rms_norm._rms_norm_fwd_kernel, tile, C=width, RESIDUAL=True, PARTS=parts
            )
            sizes = dict(C=width, DH=True, DW=True, Y=True, PARTS=parts)
            # Parts come with few tokens.
            of_rows = larger if parts == 1 else tile
            found[f"model rms_norm backward {name}"] = model_kernel(
                rms_norm._rms_norm_bwd_kernel, of_rows, **sizes
            )
    for heads in (16, 32):
        sizes = dict(H=heads, K=8, D=128)
        found[f"model qk_norm_rope {heads}"] = model_kernel(
            qk_norm_rope._qk_norm_rope_fwd_kernel,
            qk_norm_rope_backward.tile_of_heads(128, qk_norm_rope._WARPS),
            **sizes,
        )
        tile = qk_norm_rope_backward.tile_of_heads(128, qk_norm_rope_backward._WARPS)
        fp32 = {"dk_ptr": "*fp32", "dv_ptr": "*fp32"}
        for name, others, changes in (
            ("", {}, dict(PARTS=1, ONCE=True, TOKENS=2)),
            (" parts", fp32, dict(PARTS=heads // 8, ONCE=True, TOKENS=2)),
            (" long", {}, dict(PARTS=1, ONCE=False, TOKENS=1)),
        ):
            found[f"model qk_norm_rope backward {heads}{name}"] = model_kernel(
                qk_norm_rope_backward._qk_norm_rope_bwd_kernel,
                *(tile, others),
                VALUES=True,
                **changes,
                **sizes,
            )
    tile = dict(ROWS=rope_tables._ROWS, BLOCK=64, num_warps=4)
    found["model rope_tables"] = model_kernel(
        rope_tables._rope_tables_kernel, tile, HALF=64, COUNT=True
    )
    tile = dict(BLOCK=1024, num_warps=4)
    found["model swiglu"] = model_kernel(swiglu._swiglu_fwd_kernel, tile, F=3072)
    for width, count in ((3072, 3), (12_288, 4)):
        for name, constants in (("", {}), (" alone", {"y_ptr": None})):
            found[f"model swiglu backward {width}{name}"] = model_kernel(
                swiglu._swiglu_bwd_kernel, tile, F=width, COUNT=count, **constants
            )
    tile = dict(BLOCK=4096, num_warps=8)
    for lse, grad, continued in ((1, 1, 0), (1, 0, 1), (0, 1, 0)):
        found[f"model cross_entropy {lse}{grad}{continued}"] = model_kernel(
            linear_cross_entropy._cross_entropy_kernel,
            tile,
            LSE=bool(lse),
            GRAD=bool(grad),
            CONTINUED=bool(continued),
            **({} if grad and not lse else {"dloss_ptr": None}),
        )
    tile = dict(BLOCK_T=row_update.TOKENS, BLOCK_C=256, num_warps=1)
    found["model add_rows"] = model_kernel(row_update._add_rows_kernel, tile)
    tile = sort_ids._TILE | dict(BLOCK=256)
    found["model sort_ids"] = model_kernel(sort_ids._sort_ids_kernel, tile)
    for states in ("bf16", "int8"):
        found[f"model keep_rows {states}"] = keep_kernel(states)
    tile = column_sum._TILE
    found["model column_sum"] = model_kernel(column_sum._column_sum_kernel, tile, C=1024)
    found["model column_sums"] = model_kernel(
        column_sum._column_sums_kernel, tile, ALIGN=16, CAPACITY=target.CAPACITY
    )
    return found


def attention_kernel(kernel: Any, tile: dict[str, int], size: int, **constants: Any) -> dict:
    """A kernel of attention, bf16 tensors; a group of two query heads a key."""
    names, tile = kernel.arg_names, dict(tile)
    options = {n: tile.pop(n) for n in ("num_warps", "num_stages") if n in tile}
    options["launch_pdl"] = True
    constants |= tile | {"PDL": True}
    rows = {"q": "BLOCK_Q", "k": "BLOCK_K", "v": "BLOCK_K"}
    types: dict[str, Any] = {n: "*fp32" for n in ("lse_ptr", "delta_ptr", "parts_ptr")}
    types |= dict(minus_ptr="*fp32", fine_ptr="*fp32", sizes_ptr="*i32", sums_ptr="*i64")
    types |= {"c": "fp32", "scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    for n in ("q", "k", "v", "dout"):
        block = tile.get("BLOCK", tile.get(rows.get(n, "")))
        types[n] = f"tensordesc<bf16[1,1,{block},{size}]>"
        types[f"{n}_rows"] = ("*bf16", "i32", "i32", "i32")
    for n in ("lse", "delta"):
        types[n] = f"tensordesc<fp32[1,{tile.get('BLOCK')}]>"
    if "ROWS" in tile:
        types |= {n: ("*bf16", "i32", "i32", "i32") for n in ("dout", "out", "k", "v")}
    signature = {n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in names}
    free = ("B", "T", "rows", "turn", "all_kv", "c", "scale", *constants)
    aligned: list[tuple[int, ...]] = []
    for i, (n, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            aligned += [(i, j) for j in range(len(kind))]
        elif n not in free and not kind.startswith("tensordesc"):
            aligned.append((i,))
    return kernel_usage(kernel, signature, constants, aligned, options)


def fixed_point_kernels(size: int) -> dict[str, dict[str, int]]:
    """In front of and behind the backward kernel for long sequences."""
    constants: dict[str, Any] = dict(H=16, GROUP=2, D=size)
    tile = dict(ROWS=attention_fixed_point.CHUNK, num_warps=4)
    limits = dict(BITS=attention_fixed_point.BITS, MOST=attention_fixed_point.MOST)
    prepare = attention_fixed_point._attention_prepare_kernel
    finish = attention_fixed_point._attention_finish_kernel
    return {
        "model attention prepare": attention_kernel(prepare, tile, size, **constants),
        "model attention finish": attention_kernel(finish, tile, size, **constants, **limits),
    }


def attention_kernels() -> dict[str, dict[str, int]]:
    found = {}
    for size in (64, 128):
        q = torch.empty(1, 16, 1, size, dtype=torch.bfloat16)
        common = attention_tiles.common_options(q, q[:, ::2])
        found[f"attention {size}"] = attention_kernel(
            attention._attention_fwd_kernel, attention._forward_tile(q), size, **common
        )
        for heads in (1, 2):
            tile = attention_backward._backward_tile(q)
            found[f"attention backward {size} {heads}"] = attention_kernel(
                attention_backward._attention_bwd_kernel,
                tile,
                size,
                **common,
                HEADS=heads,
                PDL=True,
            )
        found[f"model attention delta {size}"] = attention_kernel(
            attention_backward._attention_delta_kernel,
            dict(ROWS=attention_backward._DELTA_ROWS, num_warps=4),
            size,
            H=16,
            D=size,
        )
        if size == 128:
            found |= fixed_point_kernels(size)
        found[f"model sum_heads {size}"] = attention_kernel(
            attention_backward._sum_heads_kernel,
            dict(ROWS=attention_backward._SUM_ROWS, num_warps=4),
            size,
            GROUP=2,
            D=size,
        )
    return found


def hopper_kernel(
    rule: Any, stochastic: bool, states: str = "bf16", layout: str = "wide"
) -> dict[str, int]:
    count = hopper_ring.GROUPS.value
    constants = dict(
        SCALARS=rule.scalar_count,
        RULE=hopper_ring.gluon_function(rule.update),
        STOCHASTIC=stochastic,
        LAYOUT=layout,
    )
    blocks, layouts = hopper_ring.BLOCKS, hopper_ring.LAYOUTS
    if layout != "wide":
        blocks, layouts = hopper_pair.PAIR_BLOCKS, hopper_pair.PAIR_LAYOUTS
    if states == "int8":
        kernel = wgrad_update_hopper_int8._wgrad_update_hopper_int8_kernel
    else:
        kernel = wgrad_update_hopper._wgrad_update_hopper_kernel
    names = kernel.arg_names
    types = {"scalars_ptr": "*fp32", "seed_ptr": "*i32"} | dict.fromkeys(constants, "constexpr")
    exponents = "*u16" if layout == "wide" else "*u8"
    types |= {f"{prefix}{j}": exponents for prefix in ("sm", "sv") for j in range(count)}
    for i, prefix in enumerate(("dy", "x", "w", "m", "v")):
        for j in range(count):
            types[f"{prefix}{j}"] = f"tensordesc<bf16{blocks[i]},{layouts[i]!r}>"
    source = GluonASTSource(
        fn=kernel,
        signature={n: types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={},
    )
    _, options = wgrad_update_hopper._PROGRAMS[layout]
    return usage(source, dict(launch_pdl=True, **options))


def product_kernels() -> dict[str, dict[str, int]]:
    """Products of the linear layers, one for each kind of tile in the tables."""
    found, kernel = {}, linear_hopper._linear_hopper_kernel
    names = kernel.arg_names
    for dx, tiles in ((False, linear_auto.FORWARD), (True, linear_auto.BACKWARD)):
        kinds = {tile._replace(parts=1) for tile in (*tiles.values(), linear_auto.OTHER)}
        for tile, prefetch in itertools.product(sorted(kinds), (True, False)):
            constants = dict(SLOTS=tile.slots, DX=dx, PREFETCH=prefetch)
            types: dict[str, Any] = dict.fromkeys(constants, "constexpr")
            for n, block in zip(names, linear_hopper.blocks(tile, dx), strict=False):
                types[n] = f"tensordesc<bf16{block},{linear_hopper.layout_of(block)!r}>"
            source = GluonASTSource(
                fn=kernel,
                signature={n: types.get(n, "i32") for n in names},
                constexprs={(names.index(n),): value for n, value in constants.items()},
                attrs={},
            )
            form = "dx" if dx else "y"
            name = f"linear_hopper {form} {tile.columns} {tile.slots}{' prefetch' * prefetch}"
            found[name] = usage(source, dict(num_warps=8, launch_pdl=True))
    return found


def main() -> None:
    hopper = ARCHITECTURE == 90
    found: dict[str, dict[str, int]] = {}
    if hopper:
        found = model_kernels() | attention_kernels() | product_kernels()
        found |= attention_hopper_kernels(usage)
    known = [value for value in vars(rules).values() if isinstance(value, rules.Rule)]
    for rule in known if hopper else (rules.ADAMW, rules.LION, rules.SGD):
        for states in ("bf16", "int8") if rule.states else ("bf16",):
            name = f"{rule.name} {'int8' * (states == 'int8')}".strip()
            constants = {"ELEMENTS": apply_rule._ELEMENTS, "BLOCK": target.BLOCK}
            options = {"num_warps": 4, "launch_pdl": EARLY}
            found[f"apply_rule {name}"] = table_kernel(
                apply_rule._apply_rule_kernel, rule, constants | {"PDL": EARLY}, options, states
            )
            if rule.states:
                found[f"update_rows {name}"] = rows_kernel(rule, states)
            tile = wgrad_update._tile(operand_bytes=2)
            options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
            constants = dict(PRECISION="ieee", UPCAST=False, **tile)
            found[f"wgrad_update {name}"] = table_kernel(
                wgrad_update._wgrad_update_kernel, rule, constants, options, states
            )
        if len(rule.states) == 2 and hopper:
            for stochastic, layout in itertools.product((True, False), LAYOUTS[:2]):
                name = f"{'stochastic ' * stochastic}{layout} {rule.name}"
                found[f"wgrad_update_hopper {name}"] = hopper_kernel(
                    rule, stochastic, "bf16", layout
                )
            for layout in LAYOUTS:
                name = f"wgrad_update_hopper {layout} {rule.name} int8"
                found[name] = hopper_kernel(rule, True, "int8", layout)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
