"""A model to be compressed: its weights, from the checkpoint or in memory, and where it can be run, text in its tokens."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from gcjax.errors import GcjaxError
from gcjax.models import llama
from gcjax.pretrained import architectures, decoder, sources, tokenizer
from gcjax.pretrained.architectures import Plan
from gcjax.pretrained.decoder import Decoder, Tokens
from gcjax.pretrained.files import Checkpoint
from gcjax.pretrained.options import Compression


class Weights(NamedTuple):
    """The projections of a model: `read` gives `W[out, in]` of one at a layer's place, and `has` says where there are none."""

    matrices: tuple[str, ...]
    depth: int
    has: Callable[[str, int], bool]
    read: Callable[[str, int], np.ndarray]


class Running(NamedTuple):
    """A model in memory, and text in its tokens."""

    model: Decoder
    text: Tokens
    tokenizer: Tokenizer


class Opened(NamedTuple):
    """A model to be compressed; `running` is None where it cannot be run, and `notes` say why."""

    name: str
    checkpoint: Checkpoint
    plan: Plan
    weights: Weights
    running: Running | None
    notes: tuple[str, ...]


def open_model(model: str, options: Compression, weights_only: bool, say: Callable[[str], object]) -> Opened:
    """The model and, unless `weights_only`, text for it.

    Raises `GcjaxError` for a checkpoint that cannot be read, windows longer than it is deep, and too short a text.
    """
    path = sources.resolve(model, say)
    checkpoint = sources.open_model(path)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    plan = architectures.plan(shapes, checkpoint.config, checkpoint.format)
    if max(options.windows) > len(plan.layers):
        raise GcjaxError(f"--windows {max(options.windows)} is longer than the model, which has {len(plan.layers)} layers")
    running, notes = None, (*checkpoint.notes, *plan.notes)
    if not weights_only:
        try:
            made = tokenizer.of_checkpoint(path, checkpoint.format)
            found = decoder.decoder(path, checkpoint)
        except GcjaxError as error:
            notes = (*notes, f"weights only, no perplexity: {error}")
        else:
            running = Running(found, decoder.tokens(made, options, say), made)
    for note in notes:
        say(f"note: {note}")
    return Opened(model, checkpoint, plan, _of_plan(plan, checkpoint) if running is None else _of_model(found), running, notes)


def _of_plan(plan: Plan, checkpoint: Checkpoint) -> Weights:
    units = {(unit.projection, plan.layers.index(unit.layer)): unit for unit in plan.matrices}
    matrices = tuple(dict.fromkeys(unit.projection for unit in plan.matrices))
    return Weights(
        matrices,
        len(plan.layers),
        lambda matrix, place: (matrix, place) in units,
        lambda matrix, place: architectures.whole(units[matrix, place], checkpoint),
    )


def _of_model(model: Decoder) -> Weights:
    return Weights(
        llama.MATRICES,
        len(model.layers),
        lambda matrix, place: True,
        lambda matrix, place: np.asarray(model.layers[place][matrix]).T,
    )
