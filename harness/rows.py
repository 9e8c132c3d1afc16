"""Which rows a run has: method x model kernels x way of execution."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forge.optim.registry import REGISTRY, find, plugins
from forge.optim.spec import OptimizerSpec

KERNELS = ("hf", "liger", "liger+flce", "torch", "forge")


@dataclass(frozen=True)
class Row:
    """One method with the kernels of its model and the way its step is executed."""

    key: str
    kernels: str
    execution: str

    @property
    def id(self) -> str:
        """``key/kernels/execution``."""
        return f"{self.key}/{self.kernels}/{self.execution}"

    @property
    def spec(self) -> OptimizerSpec:
        """The method's entry in the registry."""
        return find(self.key)


# `all` also has the strongest rival, a row for what Liger's fused loss costs, and on a GPU our own
# kernels, which any method may use.
VARIANTS = (
    Row("adamw-fused", "torch", "cuda_graph"),
    Row("adamw-fused", "torch", "compile+cuda_graph"),
    Row("adamw-fused", "liger+flce", "eager"),
    Row("forge-bf16", "forge", "eager"),
    Row("forge-bf16", "forge", "cuda_graph"),
    Row("forge-int8", "forge", "cuda_graph"),
)


def default_kernels(device: str, execution: str) -> str:
    """Liger where it runs, as the published rows did; the plain twin where a graph is captured."""
    if execution != "eager":
        return "torch"
    return "liger" if device == "cuda" and importlib.util.find_spec("liger_kernel") else "hf"


def select_rows(
    keys: Sequence[str],
    device: str,
    kernels: str | None = None,
    execution: str | None = None,
    states: str | None = None,
    named: str = "--optimizers",
) -> list[Row]:
    """Rows of a run.

    Args:
        keys: methods (:func:`forge.optim.registry.find`), or ``["all"]``: every method, those of
            installed plug-ins too, plus :data:`VARIANTS` unless ``kernels`` or ``execution`` asks
            for one kind.
        states: keep methods that store their state this way.
        named: the parameter that ``keys`` come from, for the message of an error.

    Raises:
        ValueError: a key without a spec, or nothing is left; the message names the valid values.
    """
    everything = list(keys) == ["all"]
    chosen = [*REGISTRY, *plugins()[0]] if everything else list(dict.fromkeys(keys))
    for key in chosen:
        try:
            find(key)
        except ValueError as error:
            raise ValueError(f"{named}: {error}") from error
    way = execution or "eager"
    rows = [Row(key, kernels or default_kernels(device, way), way) for key in chosen]
    if everything and kernels is None and execution is None:
        rows += [row for row in VARIANTS if device == "cuda" or row.kernels != "forge"]
    if states is None:
        return rows
    kept = [row for row in rows if row.spec.states == states]
    if not kept:
        known = sorted({row.spec.states for row in rows})
        raise ValueError(f"--states: no chosen method stores {states!r}; valid: {', '.join(known)}")
    return kept


def cannot_run(row: Row, device: str) -> tuple[str, str] | None:
    """Status and reason of a row that is settled without starting it, else ``None``."""
    spec = row.spec
    if device not in spec.devices:
        return "unsupported", f"{spec.method} runs on {', '.join(spec.devices)} only"
    if "cuda_graph" in row.execution and device != "cuda":
        return "unsupported", "a CUDA graph needs a CUDA device"
    if row.kernels.startswith("liger") and device != "cuda":
        return "unsupported", "Liger's kernels need a CUDA device"
    package = spec.target.partition(":")[0].partition(".")[0]
    missing = _missing([package, *(["liger_kernel"] if "liger" in row.kernels else [])])
    if missing:
        name = spec.distribution if missing == package else "liger-kernel"
        return "skipped", f"{name or missing} is not installed"
    return None


def _missing(packages: Iterable[str]) -> str:
    return next((name for name in packages if importlib.util.find_spec(name) is None), "")
