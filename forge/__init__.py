"""forge-optim: optimizer steps fused into the backward pass.

>>> from forge import ForgeAdamW
>>> optimizer = ForgeAdamW(model, lr=2e-5)  # doctest: +SKIP
"""

from forge._version import __version__
from forge.optimizer import ForgeOptimizer
from forge.optimizers import (
    ForgeAdagrad,
    ForgeAdam,
    ForgeAdamW,
    ForgeLion,
    ForgeNAdam,
    ForgeRAdam,
    ForgeRMSprop,
    ForgeSGD,
)
from forge.patch import optimize
from forge.train_step import TrainStep

__all__ = [
    "ForgeAdagrad",
    "ForgeAdam",
    "ForgeAdamW",
    "ForgeLion",
    "ForgeNAdam",
    "ForgeOptimizer",
    "ForgeRAdam",
    "ForgeRMSprop",
    "ForgeSGD",
    "TrainStep",
    "__version__",
    "optimize",
]
