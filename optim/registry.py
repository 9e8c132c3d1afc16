"""Every optimizer of the comparison. To add one: write its file, add its module here."""

from __future__ import annotations

from forge.optim import (
    adalomo,
    apollo,
    bitsandbytes_adamw,
    flash_adamw,
    forge_adamw,
    galore,
    muon,
    optimi_adamw,
    torch_adamw,
    torchao_adamw,
)
from forge.optim.spec import OptimizerSpec

_MODULES = (
    torch_adamw,
    bitsandbytes_adamw,
    flash_adamw,
    galore,
    apollo,
    optimi_adamw,
    adalomo,
    torchao_adamw,
    muon,
    forge_adamw,
)

REGISTRY: dict[str, OptimizerSpec] = {
    spec.key: spec for module in _MODULES for spec in module.SPECS
}
