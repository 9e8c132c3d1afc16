"""Every optimizer of the comparison. To add one: write its file, add its module here."""

from __future__ import annotations

from forge.optim import torch_adamw
from forge.optim.spec import OptimizerSpec

_MODULES = (torch_adamw,)

REGISTRY: dict[str, OptimizerSpec] = {
    spec.key: spec for module in _MODULES for spec in module.SPECS
}
