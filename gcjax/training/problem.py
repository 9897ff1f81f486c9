"""What is trained: a model on data, as the pure functions that the training loop needs."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gcjax.errors import GcjaxError, nearest

KINDS = {"mlp": "classification", "llama": "language"}  # model.kind -> the module of gcjax.training that trains it


class Problem(NamedTuple):
    """`data` (a pytree of arrays) is an argument everywhere, so that it is never baked into a program."""

    init: Callable[[Any], Any]  # key -> params
    batch: Callable[[Any, Any, Any], Any]  # data, key, step -> batch
    loss: Callable[[Any, Any], Any]  # params, batch -> mean loss, nats
    evaluate: Callable[[Any, Any], Mapping[str, Any]]  # params, data -> metrics on held-out data
    stacks: Callable[[Any], Mapping[str, Any]]  # params-like -> matrix name -> W[L, out, in]
    roles: Mapping[str, str]  # parameter name -> "matrix", "embedding", "vector"
    # params, data, stacks of gradients, leading (v, u) of each -> `geometry.activity`'s measures by matrix; {}: not measured
    activity: Callable[[Any, Any, Any, Any], Mapping[str, Mapping[str, Any]]]
    microbatches: int  # equal parts of a batch whose gradients are computed one after the other


def load_data(config: Any, say: Callable[[str], object] = lambda _: None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays that `config.data` names, held-out ones among them, and their provenance (source, sizes, content hash).

    `say` gets a sentence before what takes long. Raises `GcjaxError` for data that cannot be had.
    """
    return _module(config).load_data(config, say)


def build(config: Any) -> Problem:
    """The problem of a bound config (traced fields may be tracers); raises `GcjaxError` for an unknown `model.kind`."""
    return _module(config).build(config)


def _module(config: Any) -> Any:
    if config.model.kind not in KINDS:
        raise GcjaxError(f"model.kind={config.model.kind!r} does not exist; {nearest(config.model.kind, KINDS)}")
    return importlib.import_module(f"gcjax.training.{KINDS[config.model.kind]}")
