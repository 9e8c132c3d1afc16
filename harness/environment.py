"""The machine and the software a number was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def one_line(error: BaseException) -> str:
    """Type and first line of ``error``, as a note of a record."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def package_version(distribution: str) -> str:
    """Installed version, or an empty string."""
    try:
        return version(distribution)
    except (PackageNotFoundError, ValueError):
        return ""


@cache
def gpus() -> list[dict[str, str]]:
    """Name and driver of each visible NVIDIA GPU. Asks the driver, so no CUDA context is made."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.split(", ") for line in answer.stdout.splitlines() if ", " in line]
    found = [{"name": name, "driver": driver} for name, driver in lines]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen = [int(i) for i in visible.split(",") if i.strip().isdigit()]
    return [found[i] for i in chosen if i < len(found)]


def cpu_name() -> str:
    """Model name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def git_state() -> tuple[str, bool | None]:
    """Commit of the checkout this code runs from and whether it has changes.

    A copy on a machine that only measures is told by ``FORGE_COMMIT``, also where it came with some
    repository of its own.
    """
    told = os.environ.get("FORGE_COMMIT", "")
    if told:
        return told, None
    try:
        # An installed copy may lie inside somebody else's checkout.
        if Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return "", None
        commit = _git("rev-parse", "--short=9", "HEAD")
        return commit, bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "", None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def describe() -> dict[str, Any]:
    """Everything about machine and software that does not depend on the row."""
    commit, dirty = git_state()
    visible = gpus()
    return {
        "gpu": visible[0]["name"] if visible else "",
        "driver": visible[0]["driver"] if visible else "",
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "triton": package_version("triton"),
        "transformers": package_version("transformers"),
        "liger_kernel": package_version("liger-kernel"),
        "numpy": package_version("numpy"),
        "forge_optim": package_version("forge-optim"),
        "commit": commit,
        "dirty": dirty,
        "command": " ".join(["forge-bench", *sys.argv[1:]]),
    }
