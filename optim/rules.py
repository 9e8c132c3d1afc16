"""Element-wise update rules, each written once.

A rule is two pure functions. ``scalars(step, hyper)`` gives what a step's updates need, in fp64.
``update(w, g, states, scalars)`` gives the new weight and states, which start at zero. torch runs
them as they stand: on fp64 tensors they are the truth that every kernel is tested against. Triton
runs the same source.

Updates divide by ``divide``, not by ``/``, which on a GPU would also guard against denominators
that fp32 can hardly hold.

In the names below ``l2`` is a weight decay that is added to the gradient, ``decay`` the share of
itself that a weight loses, and ``rate`` the weight of the newest gradient in an average.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import divide, exp2, log2, sign, sqrt, where

from forge.kernels.runtime import Dual


@dataclass(frozen=True)
class Rule:
    """An element-wise optimizer.

    Args:
        name: lower case.
        states: names of the per-element states, in the order that ``update`` takes them.
        hyper: names of the hyperparameters, in the order that ``scalars`` takes them; a dotted
            name such as ``betas.0`` is an element of a param group's tuple.
        scalar_count: how many scalars ``scalars`` returns.
        carried: names of scalars that follow a recurrence over the steps and start at 1.
            ``scalars`` takes their values before the step after ``hyper``'s, and returns those
            after the step behind its own.
        nonnegative: those of ``states`` that are never below zero: they are stored in a code of
            their own where states have 8 bits.
        kept: names of hyperparameters, one for each of ``states``: the share of it that stays in a
            step. Where one is 0, kernels are given zeros for that state: ``x + (g - x) * 1`` is not
            ``g``, but off by the rounding of ``x``, which may be the larger one by far.
        counted: False when the rule asks no more of the step count than whether it is 1, and its
            other implementations save none.
    """

    name: str
    states: tuple[str, ...]
    hyper: tuple[str, ...]
    scalar_count: int
    scalars: Dual
    update: Dual
    carried: tuple[str, ...] = ()
    nonnegative: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    counted: bool = True


def _adamw_scalars(step, hyper):
    lr, beta1, beta2, eps, weight_decay = hyper
    bias1 = 1 - exp2(step * log2(beta1))
    bias2 = 1 - exp2(step * log2(beta2))
    return lr * weight_decay, lr / bias1, 1 - beta1, 1 - beta2, 1 / sqrt(bias2), eps


def _adamw_update(w, g, states, scalars):
    exp_avg, exp_avg_sq = states
    decay, step_size, rate1, rate2, inv_root_bias2, eps = scalars
    exp_avg = exp_avg + (g - exp_avg) * rate1
    exp_avg_sq = exp_avg_sq + (g * g - exp_avg_sq) * rate2
    update = divide(step_size * exp_avg, sqrt(exp_avg_sq) * inv_root_bias2 + eps)
    # One expression: `w * (1 - lr * wd)` in fp32 would lose most of a decay of 1e-7.
    return w - (decay * w + update), (exp_avg, exp_avg_sq)


ADAMW = Rule(
    name="adamw",
    states=("exp_avg", "exp_avg_sq"),
    nonnegative=("exp_avg_sq",),
    kept=("betas.0", "betas.1"),
    hyper=("lr", "betas.0", "betas.1", "eps", "weight_decay"),
    scalar_count=6,
    scalars=Dual(_adamw_scalars),
    update=Dual(_adamw_update),
)


def _adam_scalars(step, hyper):
    lr, beta1, beta2, eps, l2 = hyper
    bias1 = 1 - exp2(step * log2(beta1))
    bias2 = 1 - exp2(step * log2(beta2))
    return l2, lr / bias1, 1 - beta1, 1 - beta2, 1 / sqrt(bias2), eps


def _adam_update(w, g, states, scalars):
    exp_avg, exp_avg_sq = states
    l2, step_size, rate1, rate2, inv_root_bias2, eps = scalars
    g = g + l2 * w
    exp_avg = exp_avg + (g - exp_avg) * rate1
    exp_avg_sq = exp_avg_sq + (g * g - exp_avg_sq) * rate2
    update = divide(step_size * exp_avg, sqrt(exp_avg_sq) * inv_root_bias2 + eps)
    return w - update, (exp_avg, exp_avg_sq)


ADAM = Rule(
    name="adam",
    states=("exp_avg", "exp_avg_sq"),
    nonnegative=("exp_avg_sq",),
    kept=("betas.0", "betas.1"),
    hyper=("lr", "betas.0", "betas.1", "eps", "weight_decay"),
    scalar_count=6,
    scalars=Dual(_adam_scalars),
    update=Dual(_adam_update),
)


def _nadam_scalars(step, hyper):
    lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled, mu_product = hyper
    log2_096 = -0.058893689053568565
    mu = beta1 * (1 - 0.5 * exp2(step * momentum_decay * log2_096))
    mu_next = beta1 * (1 - 0.5 * exp2((step + 1) * momentum_decay * log2_096))
    mu_product = mu_product * mu
    return (
        lr * weight_decay * decoupled,
        weight_decay * (1 - decoupled),
        lr * (1 - mu) / (1 - mu_product),
        lr * mu_next / (1 - mu_product * mu_next),
        1 - beta1,
        1 - beta2,
        1 / sqrt(1 - exp2(step * log2(beta2))),
        eps,
        mu_product,
    )


def _nadam_update(w, g, states, scalars):
    exp_avg, exp_avg_sq = states
    decay, l2, grad_size, avg_size, rate1, rate2, inv_root_bias2, eps = scalars
    g = g + l2 * w
    exp_avg = exp_avg + (g - exp_avg) * rate1
    exp_avg_sq = exp_avg_sq + (g * g - exp_avg_sq) * rate2
    size = grad_size * g + avg_size * exp_avg
    update = divide(size, sqrt(exp_avg_sq) * inv_root_bias2 + eps)
    return w - (decay * w + update), (exp_avg, exp_avg_sq)


NADAM = Rule(
    name="nadam",
    states=("exp_avg", "exp_avg_sq"),
    nonnegative=("exp_avg_sq",),
    kept=("betas.0", "betas.1"),
    hyper=(
        "lr",
        "betas.0",
        "betas.1",
        "eps",
        "weight_decay",
        "momentum_decay",
        "decoupled_weight_decay",
    ),
    scalar_count=8,
    scalars=Dual(_nadam_scalars),
    update=Dual(_nadam_update),
    carried=("mu_product",),
)


def _radam_scalars(step, hyper):
    lr, beta1, beta2, eps, weight_decay, decoupled = hyper
    power2 = exp2(step * log2(beta2))
    bias1, bias2 = 1 - exp2(step * log2(beta1)), 1 - power2
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * power2 / bias2
    rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    # From a short average the variance cannot be told: the denominator is 1.
    scale = 1 / sqrt(where(length > 5, rectified, 1.0) * bias2)
    return (
        lr * weight_decay * decoupled,
        weight_decay * (1 - decoupled),
        lr / bias1,
        1 - beta1,
        1 - beta2,
        where(length > 5, scale, 0.0),
        where(length > 5, scale * eps, 1.0),
    )


def _radam_update(w, g, states, scalars):
    exp_avg, exp_avg_sq = states
    decay, l2, step_size, rate1, rate2, root_scale, offset = scalars
    g = g + l2 * w
    exp_avg = exp_avg + (g - exp_avg) * rate1
    exp_avg_sq = exp_avg_sq + (g * g - exp_avg_sq) * rate2
    update = divide(step_size * exp_avg, sqrt(exp_avg_sq) * root_scale + offset)
    return w - (decay * w + update), (exp_avg, exp_avg_sq)


RADAM = Rule(
    name="radam",
    states=("exp_avg", "exp_avg_sq"),
    nonnegative=("exp_avg_sq",),
    kept=("betas.0", "betas.1"),
    hyper=("lr", "betas.0", "betas.1", "eps", "weight_decay", "decoupled_weight_decay"),
    scalar_count=7,
    scalars=Dual(_radam_scalars),
    update=Dual(_radam_update),
)


def _lion_scalars(step, hyper):
    lr, beta1, beta2, weight_decay = hyper
    return lr * weight_decay, lr, 1 - beta1, 1 - beta2


def _lion_update(w, g, states, scalars):
    (exp_avg,) = states
    decay, lr, rate1, rate2 = scalars
    update = lr * sign(exp_avg + (g - exp_avg) * rate1)
    exp_avg = exp_avg + (g - exp_avg) * rate2
    return w - (decay * w + update), (exp_avg,)


LION = Rule(
    name="lion",
    states=("exp_avg",),
    hyper=("lr", "betas.0", "betas.1", "weight_decay"),
    scalar_count=4,
    scalars=Dual(_lion_scalars),
    update=Dual(_lion_update),
    counted=False,
)


def _sgd_scalars(step, hyper):
    return hyper


def _sgd_update(w, g, states, scalars):
    lr, l2 = scalars
    return w - lr * (g + l2 * w), states


SGD = Rule(
    name="sgd",
    states=(),
    hyper=("lr", "weight_decay"),
    scalar_count=2,
    scalars=Dual(_sgd_scalars),
    update=Dual(_sgd_update),
    counted=False,
)


def _sgd_momentum_scalars(step, hyper):
    lr, momentum, dampening, l2, nesterov = hyper
    # The buffer starts as the first gradient, undamped; without momentum it is the gradient.
    rate = where((step == 1) | (momentum == 0), 1.0, 1 - dampening)
    return l2, momentum, rate, lr * nesterov, lr * (1 - nesterov + nesterov * momentum)


def _sgd_momentum_update(w, g, states, scalars):
    (buffer,) = states
    l2, momentum, rate, grad_size, buffer_size = scalars
    g = g + l2 * w
    buffer = momentum * buffer + rate * g
    return w - (grad_size * g + buffer_size * buffer), (buffer,)


SGD_MOMENTUM = Rule(
    name="sgd_momentum",
    states=("momentum_buffer",),
    hyper=("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    scalar_count=5,
    scalars=Dual(_sgd_momentum_scalars),
    update=Dual(_sgd_momentum_update),
    counted=False,
)


def _rmsprop_scalars(step, hyper):
    lr, alpha, eps, l2 = hyper
    return l2, lr, 1 - alpha, eps


def _rmsprop_update(w, g, states, scalars):
    (square_avg,) = states
    l2, lr, rate, eps = scalars
    g = g + l2 * w
    square_avg = square_avg + (g * g - square_avg) * rate
    return w - divide(lr * g, sqrt(square_avg) + eps), (square_avg,)


RMSPROP = Rule(
    name="rmsprop",
    states=("square_avg",),
    nonnegative=("square_avg",),
    kept=("alpha",),
    hyper=("lr", "alpha", "eps", "weight_decay"),
    scalar_count=4,
    scalars=Dual(_rmsprop_scalars),
    update=Dual(_rmsprop_update),
)


def _adagrad_scalars(step, hyper):
    lr, lr_decay, l2, initial, eps = hyper
    return l2, lr / (1 + (step - 1) * lr_decay), where(step == 1, initial, 0.0), eps


def _adagrad_update(w, g, states, scalars):
    (total,) = states
    l2, lr, initial, eps = scalars
    g = g + l2 * w
    total = total + (initial + g * g)
    return w - divide(lr * g, sqrt(total) + eps), (total,)


ADAGRAD = Rule(
    name="adagrad",
    states=("sum",),
    nonnegative=("sum",),
    hyper=("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    scalar_count=4,
    scalars=Dual(_adagrad_scalars),
    update=Dual(_adagrad_update),
)
