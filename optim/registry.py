"""Every optimizer of the comparison. To add one: write its file, add its name here.

Other packages add theirs from outside, by an entry point or by ``module:attribute``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from forge.optim.spec import OptimizerSpec

_MODULES = (
    "torch_adamw",
    "bitsandbytes_adamw",
    "flash_adamw",
    "galore",
    "apollo",
    "optimi_adamw",
    "adalomo",
    "torchao_adamw",
    "muon",
    "forge_adamw",
)

REGISTRY: dict[str, OptimizerSpec] = {
    spec.key: spec for name in _MODULES for spec in import_module(f"forge.optim.{name}").SPECS
}

GROUP = "forge_optim.optimizers"


def find(name: str) -> OptimizerSpec:
    """The spec called ``name``: a key, an entry point of :data:`GROUP`, or ``module:attribute``.

    Nothing is kept by name only, so a process that has the same import path finds the same spec.

    Raises:
        ValueError: there is none; the message says why.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    if ":" in name:
        module, _, attribute = name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            raise ValueError(f"{name} is not of the form package.module:attribute")
        return _load(name, EntryPoint(attribute, f"{module}:{attribute}", GROUP))
    specs, problems = plugins()
    if name not in specs:
        valid = ", ".join(["all", *REGISTRY, *specs, "package.module:attribute"])
        reason = "".join(f"; {problem}" for problem in problems)
        raise ValueError(f"unknown {name}; valid: {valid}{reason}")
    return specs[name]


@cache
def plugins() -> tuple[dict[str, OptimizerSpec], tuple[str, ...]]:
    """Specs of installed packages, from entry points ``key = "module:attribute"`` in
    :data:`GROUP`, and one message for each that cannot be used."""
    found: dict[str, OptimizerSpec] = {}
    problems = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        origin = f"entry point {point.name} of {point.dist.name if point.dist else '?'}"
        if point.name in REGISTRY or point.name in found:
            problems.append(f"{origin}: the key is taken, ignored")
            continue
        try:
            spec = _load(point.value, point)
        except ValueError as error:
            problems.append(f"{origin}: {error}")
            continue
        if spec.key != point.name:
            problems.append(f"{origin}: its spec has the key {spec.key!r}, give both one name")
            continue
        found[point.name] = spec
    return found, tuple(problems)


def _load(name: str, point: EntryPoint) -> OptimizerSpec:
    try:
        spec = point.load()
    except Exception as error:  # somebody else's module may raise anything
        raise ValueError(
            f"{name} does not import ({type(error).__name__}: {error}); is it installed or on "
            "PYTHONPATH?"
        ) from error
    if not isinstance(spec, OptimizerSpec):
        raise ValueError(f"{name} is a {type(spec).__name__}, not a forge.optim.spec.OptimizerSpec")
    return spec
