"""``forge-bench ofu-sweep``: does OFU tell the truth? Matrix products whose rate is known.

For each product: the share of the peak that its operations per second are, against OFU, and against
OFU without the work on padding and the time that older instructions waste.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from forge.harness import environment, hardware, ofu, options
from forge.harness.efficiency import STEP_TILE, tile_share
from forge.harness.leaderboard import write_atomically

COLUMNS = ("m, n, k, dtype, achieved_pct, ofu_pct, ofu_adjusted_pct, hardware, date, commit").split(
    ", "
)
SIZES = (512, 2048, 8192)
ALIGNED = tuple((m, n, k) for m in SIZES for n in SIZES for k in SIZES)
# Around sizes that divide into tiles and sizes that do not; odd n and k also break alignment.
RAGGED = (
    (513, 513, 513),
    (520, 1032, 2056),
    (600, 8192, 8192),
    (1000, 1000, 1000),
    (1544, 3080, 6152),
    (2048, 2048, 2049),
    (2048, 2049, 2048),
    (2049, 2048, 2048),
    (3000, 5000, 7000),
    (4000, 4000, 4000),
    (5000, 600, 3000),
    (8192, 8192, 600),
    (8184, 8184, 8184),
)
BURST_S = 0.02

# What kernel names say of their tile. BLAS is column-major, so the first extent is that of n.
_TILES = (
    re.compile(r"tilesize(\d+)x(\d+)x(\d+)"),
    re.compile(r"_(\d+)x(\d+)x(\d+)_"),
    re.compile(r"_(\d+)x(\d+)_(\d+)x\d+(?:_|$)"),
)


def tile_of(kernel: str) -> tuple[int, int, int]:
    """Tile ``(m, n, k)`` of a cuBLAS or CUTLASS kernel, by its name.

    A name that does not tell: the tile that is usual on Hopper.
    """
    for pattern in _TILES:
        match = pattern.search(kernel)
        if match:
            n, m, k = map(int, match.groups())
            return m, n, k
    return STEP_TILE


# Of the peak, what kernels reach that keep Hopper's tensor pipe busy with the instructions of older
# GPUs, which cuBLAS takes for rows that are not aligned to 16 bytes: measured on an H200.
_OLDER = {"s1688": 1 / 2, "s16816": 2 / 3}


def instruction_share(kernel: str) -> float:
    """Operations per cycle of a busy tensor pipe, as a share of the peak, by a kernel's name."""
    return next((share for name, share in _OLDER.items() if name in kernel), 1.0)


def adjusted_pct(ofu_pct: float | None, m: int, n: int, k: int, kernel: str) -> float | None:
    """OFU without the padding of the kernel's tiles and what its instructions waste."""
    share = tile_share(m, n, k, tile_of(kernel)) * instruction_share(kernel)
    return None if ofu_pct is None else ofu_pct * share


class _Product:
    """``[m, k] @ [n, k]^T`` in bf16 on random data, some 20 ms of it a call."""

    def __init__(self, m: int, n: int, k: int) -> None:
        self.x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.count = 1
        self()  # handles and workspaces
        self.count = 20
        self()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self()
        end.record()
        end.synchronize()
        self.count = max(1, int(self.count * BURST_S * 1e3 / begin.elapsed_time(end)))

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self.x, self.weight.t(), out=self.out)
        torch.cuda.synchronize()

    def kernel(self) -> str:
        """Name of the kernel that takes longest."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            torch.mm(self.x, self.weight.t(), out=self.out)
            torch.cuda.synchronize()
        kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return max(kernels, key=lambda e: e.device_time_total).name if kernels else ""


def measure(shape: tuple[int, int, int], gpu: hardware.Hardware, uuid: str) -> dict[str, Any]:
    """One product: the row of the table, and ``kernel``, ``tile`` and ``missing``."""
    m, n, k = shape
    work = _Product(m, n, k)
    kernel = work.kernel()
    seen = ofu.observe(work, uuid, gpu.tensor_clock_mhz)
    # Without a driver nothing ran, and there is no OFU either.
    window_s = seen.utilisation_window_s or math.inf
    rate = 2.0 * m * n * k * work.count * seen.steps / window_s
    return dict(
        m=m,
        n=n,
        k=k,
        dtype="bf16",
        achieved_pct=100 * rate / gpu.peak_tflops / 1e12,
        ofu_pct=seen.ofu_pct,
        ofu_adjusted_pct=adjusted_pct(seen.ofu_pct, m, n, k, kernel),
        kernel=kernel,
        tile=tile_of(kernel),
        missing=seen.missing,
    )


def text_of(rows: list[dict[str, Any]]) -> str:
    """The rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        percents = {name: f"{row[name]:.2f}" for name in COLUMNS if name.endswith("_pct")}
        writer.writerow({**row, **percents})
    return text.getvalue()


def command(
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("results/ofu_sweep.csv"),
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout")] = False,
) -> None:
    """Compare OFU with the achieved rate of 40 bf16 matrix products; needs a Hopper GPU or later.

    Takes two minutes.

    \b
    Example:
      forge-bench ofu-sweep --out results/ofu_sweep.csv
    """
    if not environment.gpus():
        options.refuse("ofu-sweep: no NVIDIA GPU here; OFU is read from the GPU's own counters")
    name = options.hardware("cuda")
    gpu = hardware.find(name)
    if gpu is None:
        options.refuse(f"ofu-sweep: the peak of {name} is not known; add it to harness/hardware.py")
    date, (commit, dirty) = datetime.now(UTC).strftime("%Y-%m-%d"), environment.git_state()
    origin = dict(hardware=name, date=date, commit=commit + ("-dirty" if dirty else ""))
    uuid, console, rows = ofu.device_uuid(), options.console(stderr=as_json), []
    shapes = (*ALIGNED, *RAGGED)
    with options.progress(console) as progress:
        task = progress.add_task("products", total=len(shapes))
        for shape in shapes:
            row = measure(shape, gpu, uuid) | origin
            if row["ofu_pct"] is None:
                options.refuse(f"ofu-sweep: no OFU on this machine: {'; '.join(row['missing'])}")
            rows.append(row)
            line = f"[{len(rows)}/{len(shapes)}] {_line(row)}"
            console.print(line, markup=False, highlight=False)
            progress.advance(task)
    write_atomically(out, text_of(rows))
    summary = agreement(rows)
    if as_json:
        print(json.dumps(dict(rows=rows, out=str(out), **summary), indent=1))
        return
    title = f"{name}, bf16: OFU against the achieved share of the peak"
    options.show_table(console, _table(summary, title))
    console.print(f"wrote {out}", highlight=False)


def _line(row: dict[str, Any]) -> str:
    size = f"{row['m']} x {row['n']} x {row['k']}"
    numbers = (row["achieved_pct"], row["ofu_pct"], row["ofu_adjusted_pct"])
    return f"{size:>20}  achieved, OFU, adjusted: " + "  ".join(f"{n:5.1f}" for n in numbers)


def agreement(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean absolute difference to the achieved percentage, and the share of products within 2."""
    found = {}
    for name in ("ofu_pct", "ofu_adjusted_pct"):
        gaps = [abs(row[name] - row["achieved_pct"]) for row in rows]
        found[f"{name}_mean_gap"] = sum(gaps) / len(gaps)
        found[f"{name}_within_2"] = sum(gap <= 2 for gap in gaps) / len(gaps)
    return found


def _table(summary: dict[str, float], title: str) -> Table:
    view = Table(title=title, title_justify="left")
    for name in ("", "mean gap, points", "within 2 points, %"):
        view.add_column(name, justify="right" if name else "left")
    for name, text in (("ofu_pct", "OFU"), ("ofu_adjusted_pct", "OFU adjusted")):
        gap, within = summary[f"{name}_mean_gap"], summary[f"{name}_within_2"]
        view.add_row(text, f"{gap:.2f}", f"{100 * within:.0f}")
    return view
