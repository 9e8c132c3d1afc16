"""forge-optim: optimizer steps fused into the backward pass.

>>> from forge import ForgeAdamW
>>> optimizer = ForgeAdamW(model, lr=2e-5)  # doctest: +SKIP
"""

from forge._version import __version__
from forge.optimizer import ForgeAdamW, ForgeOptimizer

__all__ = ["ForgeAdamW", "ForgeOptimizer", "__version__"]
