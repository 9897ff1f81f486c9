"""Classification of images: `models.mlp` on one of `data.images`' sets."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax.data import images
from gcjax.geometry import activity
from gcjax.models import mlp
from gcjax.training.problem import Problem


def load_data(config: Any, say: Callable[[str], object]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """As `problem.load_data`; what has to be fetched is small, so nothing is said."""
    loaded = images.load(config.data.name, config.data.source, config.data.directory)
    arrays = {name: getattr(loaded, name) for name in ("train_x", "train_y", "test_x", "test_y")}
    return arrays, loaded.provenance


def build(config: Any) -> Problem:
    """The problem of a bound config (traced fields may be tracers)."""
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

    def measure_activity(params: Any, data: Any, gradients: Any, leading: Any) -> dict[str, Any]:
        if not config.measure.activity:
            return {}
        assert model.hidden is not None
        assert model.activate is not None
        seen, (v1_LI, u1_LO) = model.hidden(params, data["test_x"][: config.measure.activity]), leading["hidden"]
        found = activity.measure(seen.input_LBD, seen.before_LBD, seen.after_LBD, model.activate, gradients["hidden"],
                                 v1_LI, u1_LO, jax.random.key(0))  # fmt: skip
        return {"hidden": {label.removesuffix("_L"): value for label, value in found._asdict().items()}}

    return Problem(
        init=model.init,
        batch=batch,
        loss=lambda params, xy: cross_entropy(params, *xy)[0],
        evaluate=evaluate,
        stacks=model.stacks,
        roles=model.roles,
        activity=measure_activity,
        microbatches=1,
    )
