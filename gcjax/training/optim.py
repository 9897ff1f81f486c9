"""optax chains whose hyperparameters may be traced, so that a learning-rate sweep is one compiled program.

SOAP and Shampoo are left out: no maintained JAX package offers them (optax has neither; `optax-shampoo` dates from 2022).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from gcjax.errors import GcjaxError, nearest

Mask = Callable[[optax.Params], Mapping[str, Any]]


def schedule(config: Any, steps: int) -> optax.Schedule:
    """Learning rate as a function of the step: linear warmup to `lr`, then constant or cosine to `lr * final_fraction`."""
    if config.schedule == "constant":
        after = optax.constant_schedule(1.0)
    elif config.schedule == "cosine":
        decay = max(steps - config.warmup, 1)
        after = optax.cosine_decay_schedule(1.0, decay, alpha=config.final_fraction)
    else:
        raise GcjaxError(
            f"optim.schedule={config.schedule!r} does not exist; {nearest(config.schedule, ('constant', 'cosine'))}"
        )
    shape = after
    if config.warmup:
        shape = optax.join_schedules([optax.linear_schedule(0.0, 1.0, config.warmup), after], [config.warmup])
    return lambda count: config.lr * jnp.asarray(shape(count), jnp.float32)


# Each takes the config's `optim` section (lr, betas, momentum and decay may be traced), the learning rate, and two masks:
# which parameters are matrices (for Muon) and which decay.
OPTIMIZERS: Mapping[str, Callable[[Any, optax.Schedule, Mask, Mask], optax.GradientTransformation]] = {
    "adam": lambda c, lr, matrix, decay: optax.adam(lr, c.b1, c.b2, c.eps),
    "adamw": lambda c, lr, matrix, decay: optax.adamw(lr, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=decay),
    "sgd": lambda c, lr, matrix, decay: optax.sgd(lr),
    "momentum": lambda c, lr, matrix, decay: optax.sgd(lr, c.momentum, nesterov=c.nesterov),
    "rmsprop": lambda c, lr, matrix, decay: optax.rmsprop(lr, c.b2, c.eps),
    # Not muon's own Adam: it would decay the vectors, and follow Muon's nesterov.
    "muon": lambda c, lr, matrix, decay: optax.partition(
        {
            True: muon(
                lr,
                beta=c.momentum,
                eps=c.eps,
                nesterov=c.nesterov,
                weight_decay=c.weight_decay,
                muon_weight_dimension_numbers=MuonDimensionNumbers(reduction_axis=1, output_axis=2),
            ),
            False: OPTIMIZERS["adamw"](c, lambda count: lr(count) * c.muon_adam_ratio, matrix, decay),
        },
        matrix,
    ),
}
DECAYING = ("adamw", "muon")  # the others ignore `weight_decay`


def build(config: Any, steps: int, roles: Mapping[str, str]) -> optax.GradientTransformation:
    """The optimizer that `config` (a study's `optim` section) describes.

    `roles` says for every parameter name what it is: "matrix" (a stack of layers `[L, in, out]`), "embedding" or "vector".
    Muon orthogonalizes the matrices and gives the rest to Adam; weight decay spares the vectors. Nothing is told by ndim: a
    stacked weight has three axes, and optax's default would hand it to Adam without a word. Raises `GcjaxError` for an
    unknown optimizer or schedule.
    """
    if config.name not in OPTIMIZERS:
        raise GcjaxError(f"optim.name={config.name!r} does not exist; {nearest(config.name, OPTIMIZERS)}")

    def matrix(params: Any) -> dict[str, bool]:
        return {name: roles[name] == "matrix" for name in params}

    def decay(params: Any) -> dict[str, bool]:
        return {name: roles[name] != "vector" for name in params}

    chain = OPTIMIZERS[config.name](config, schedule(config, steps), matrix, decay)
    if config.clip_norm:
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), chain)
    return chain
