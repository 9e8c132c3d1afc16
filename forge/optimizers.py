"""The optimizers that users build. Each is its rule and its torch twin's hyperparameters.

``params`` and the keyword arguments ``model``, ``states``, ``rounding`` and ``seed`` are those of
:class:`forge.optimizer.ForgeOptimizer`. Up to rounding each equals ``torch.optim``'s optimizer of
the same name, loads its ``state_dict`` and is loaded by it. What torch's takes and these do not
(``amsgrad``, ``maximize``, ``foreach``, ...) is not accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor, nn

from forge.optim.rules import (
    ADAGRAD,
    ADAM,
    ADAMW,
    LION,
    NADAM,
    RADAM,
    RMSPROP,
    SGD,
    SGD_MOMENTUM,
)
from forge.optimizer import ForgeOptimizer, Options

Params = nn.Module | Iterable[Any]
Betas = tuple[float, float]


class ForgeAdamW(ForgeOptimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101).

    Args:
        lr: learning rate, here and below; a float or a 0-d tensor.
        betas: decay rates of the first and second moment.
        eps: added to the denominator, outside the root.
        weight_decay: decoupled weight decay.
    """

    rule = ADAMW
    fixed = {"amsgrad": False, "decoupled_weight_decay": True}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        hyper = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, hyper, **options)


class ForgeAdam(ForgeOptimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980); arguments as of :class:`ForgeAdamW`.

    ``weight_decay`` is an L2 penalty: it goes through the moments.
    """

    rule = ADAM
    fixed = {"amsgrad": False, "decoupled_weight_decay": False}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        hyper = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, hyper, **options)


class ForgeNAdam(ForgeOptimizer):
    """NAdam, Adam with Nesterov momentum (Dozat 2016).

    Args:
        momentum_decay: how fast the momentum warms up from half of ``betas[0]``.
        decoupled_weight_decay: weight decay as in AdamW rather than as an L2 penalty.
    """

    rule = NADAM

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        hyper = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            momentum_decay=momentum_decay,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        super().__init__(params, hyper, **options)


class ForgeRAdam(ForgeOptimizer):
    """RAdam, Adam with a rectified variance (Liu et al., arXiv 1908.03265).

    ``decoupled_weight_decay`` as of :class:`ForgeNAdam`.
    """

    rule = RADAM

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        hyper = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        super().__init__(params, hyper, **options)


class ForgeLion(ForgeOptimizer):
    """Lion (Chen et al., arXiv 2302.06675); torch has none, state and defaults are the authors'.

    Args:
        betas: weights of the momentum in the update's sign, and in the next momentum.
        weight_decay: decoupled weight decay.
    """

    rule = LION

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), **options)


class ForgeSGD(ForgeOptimizer):
    """Stochastic gradient descent; without ``momentum`` it has no state but the step count.

    Args:
        momentum: factor of the old buffer. Groups may set their own where the constructor's is
            not 0.
        dampening: lessens what a gradient adds to the buffer, except for the first.
        weight_decay: L2 penalty.
        nesterov: look ahead by one momentum step.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        hyper = dict(lr=lr, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        if momentum == 0:
            self.rule = SGD
            self.fixed = {"momentum": 0}
        else:
            self.rule = SGD_MOMENTUM
            hyper["momentum"] = momentum
        super().__init__(params, hyper, **options)


class ForgeRMSprop(ForgeOptimizer):
    """RMSprop (Tieleman and Hinton 2012), neither centered nor with momentum.

    Args:
        alpha: decay rate of the mean square.
        eps: added to the root of the mean square.
        weight_decay: L2 penalty.
    """

    rule = RMSPROP
    fixed = {"momentum": 0, "centered": False}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        hyper = dict(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay)
        super().__init__(params, hyper, **options)


class ForgeAdagrad(ForgeOptimizer):
    """Adagrad (Duchi et al. 2011).

    Args:
        lr_decay: the learning rate at step t is ``lr / (1 + (t - 1) lr_decay)``.
        weight_decay: L2 penalty.
        initial_accumulator_value: what the sums of squares start from.
        eps: added to the root of the sum.
    """

    rule = ADAGRAD

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **options: Unpack[Options],
    ) -> None:
        hyper = dict(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        super().__init__(params, hyper, **options)
