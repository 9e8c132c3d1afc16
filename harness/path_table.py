"""``kernels/wgrad_auto.json`` from measured times: which path of the update ``auto`` takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge.harness.files import write_atomically
from forge.harness.kernel_timing import Row
from forge.kernels import wgrad_auto
from forge.kernels.wgrad_auto import PATHS

CASE = "-blocks-bf16"  # the case that decides: what every path can take
PROVIDERS = tuple(f"forge:{path}" for path in PATHS)
Ranges = list[tuple[int | None, list[str]]]


def decides(case: str) -> bool:
    """Whether the table is made from this case."""
    return case.endswith(CASE)


def complete(providers: Sequence[str]) -> bool:
    """Whether every path takes part."""
    return set(PROVIDERS) <= set(providers)


def ranges(times: Mapping[int, Mapping[str, float]]) -> Ranges:
    """Up to so many tokens, the paths in order of preference.

    Between two numbers of tokens that prefer differently, the limit is their geometric mean.

    Args:
        times: by number of tokens and path, ms.

    Raises:
        ValueError: at some number of tokens no path is left that takes every weight.
    """
    found: Ranges = []
    before = 0
    for tokens, by_path in sorted(times.items()):
        order = sorted(by_path, key=by_path.__getitem__)
        # hopper refuses some shapes; the others take all, so nothing behind the first is reached.
        general = [i for i, path in enumerate(order) if path != "hopper"]
        if not general:
            raise ValueError(f"at {tokens} tokens no path but hopper was measured: nothing written")
        order = order[: general[0] + 1]
        if found and found[-1][1] == order:
            before = tokens
            continue
        if found:
            found[-1] = (round(math.sqrt(before * tokens)), found[-1][1])
        found.append((None, order))
        before = tokens
    return found


def write(capability: str, rows: Sequence[Row]) -> Path:
    """Replace the entry of ``capability`` (``"9.0"``) in the table; the others stay.

    In a graph the GPU's time counts; eagerly the larger of GPU and host, which work side by side.

    Returns:
        The file written.

    Raises:
        ValueError: as :func:`ranges`, or no row has a time.
    """
    graph: dict[int, dict[str, float]] = {}
    eager: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.provider in PROVIDERS and row.ms is not None and row.host_ms is not None:
            path = row.provider.partition(":")[2]
            graph.setdefault(row.tokens, {})[path] = row.ms
            eager.setdefault(row.tokens, {})[path] = max(row.ms, row.host_ms)
    if not graph:
        raise ValueError("no path was measured: nothing written")
    entry = {"graph": ranges(graph), "eager": ranges(eager)}
    table = json.loads(wgrad_auto.TABLE.read_text()) | {capability: entry}
    other = table.pop("other")
    # What every GPU without an entry takes comes last.
    write_atomically(wgrad_auto.TABLE, text_of({**table, "other": other}))
    return wgrad_auto.TABLE


def text_of(table: Mapping[str, Mapping[str, Ranges]]) -> str:
    """As JSON, a line for each situation."""
    entries = [
        f'  "{capability}": {{\n'
        + ",\n".join(f'    "{name}": {json.dumps(found)}' for name, found in situations.items())
        + "\n  }"
        for capability, situations in table.items()
    ]
    return "{\n" + ",\n".join(entries) + "\n}\n"
