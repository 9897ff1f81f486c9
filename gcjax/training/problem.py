"""What is trained: a model on data, as the pure functions that the training loop needs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax.data import images
from gcjax.errors import GcjaxError, nearest
from gcjax.models import mlp

KINDS = ("mlp",)


class Problem(NamedTuple):
    """`data` (a pytree of arrays) is an argument everywhere, so that it is never baked into a program."""

    init: Callable[[Any], Any]  # key -> params
    batch: Callable[[Any, Any, Any], Any]  # data, key, step -> batch
    loss: Callable[[Any, Any], Any]  # params, batch -> mean loss, nats
    evaluate: Callable[[Any, Any], Mapping[str, Any]]  # params, data -> metrics on held-out data
    stacks: Callable[[Any], Mapping[str, Any]]  # params-like -> matrix name -> W[L, out, in]
    roles: Mapping[str, str]  # parameter name -> "matrix", "embedding", "vector"


def load_data(config: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays that `config.data` names and their provenance (source, sizes, content hash)."""
    loaded = images.load(config.data.name, config.data.source, config.data.directory)
    arrays = {name: getattr(loaded, name) for name in ("train_x", "train_y", "test_x", "test_y")}
    return arrays, loaded.provenance


def build(config: Any) -> Problem:
    """The problem of a bound config (traced fields may be tracers); raises `GcjaxError` for an unknown `model.kind`."""
    if config.model.kind not in KINDS:
        raise GcjaxError(f"model.kind={config.model.kind!r} does not exist; {nearest(config.model.kind, KINDS)}")
    model = mlp.build(config.model, images.PIXELS, images.CLASSES)
    size = config.train.batch_size

    def batch(data: Any, key: Any, step: Any) -> tuple[Any, Any]:
        rows_B = jax.random.randint(jax.random.fold_in(key, step), (size,), 0, len(data["train_y"]))
        return data["train_x"][rows_B], data["train_y"][rows_B]

    def cross_entropy(params: Any, x_BI: Any, y_B: Any) -> tuple[Any, Any]:
        logits_BC = model.apply(params, x_BI)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BC, y_B).mean(), logits_BC

    def evaluate(params: Any, data: Any) -> dict[str, Any]:
        loss, logits_BC = cross_entropy(params, data["test_x"], data["test_y"])
        right_B = logits_BC.argmax(axis=-1) == data["test_y"]
        return {"test_loss": loss, "test_accuracy": jnp.where(jnp.isfinite(loss), right_B.mean(), jnp.nan)}

    return Problem(
        init=model.init,
        batch=batch,
        loss=lambda params, xy: cross_entropy(params, *xy)[0],
        evaluate=evaluate,
        stacks=model.stacks,
        roles=model.roles,
    )
