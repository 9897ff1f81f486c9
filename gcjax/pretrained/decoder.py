"""A model on text, one layer at a time: its loss, what its projections are given, and how much each layer changes the
residual stream.

Needs a family that `gcjax.pretrained.convert` knows, a tokenizer with the checkpoint, and the model in memory, float32.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32
from ml_collections import ConfigDict
from tokenizers import Tokenizer

from gcjax.data import documents, text
from gcjax.errors import GcjaxError
from gcjax.geometry import sharing
from gcjax.models import llama
from gcjax.pretrained import convert, stored
from gcjax.pretrained.directory import is_converted
from gcjax.pretrained.files import Checkpoint
from gcjax.pretrained.options import Compression

AT_ONCE = 8  # sequences in one call of a layer
_MOST_DOCUMENTS = 100_000  # to choose from


class Tokens(NamedTuple):
    """Sequences of one length, and where they come from."""

    calibration_BT: Int32[np.ndarray, "B T"]
    held_out_BT: Int32[np.ndarray, "C T"]
    provenance: Mapping[str, str]


class Decoder(NamedTuple):
    """A model in memory: the parameters outside its layers, those of each layer, and its jitted steps."""

    section: ConfigDict
    outer: dict[str, Array]
    layers: tuple[dict[str, Array], ...]
    embed: Callable[..., Any]
    layer: Callable[..., Any]
    given: Callable[..., Any]
    losses: Callable[..., Any]


def decoder(path: Path, checkpoint: Checkpoint) -> Decoder:
    """The model at `path`; raises `GcjaxError` for a family that the forward pass does not know, or one beyond memory."""
    values = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 2 * 4 * values > memory:
        raise GcjaxError(f"its float32 parameters, twice over while they are read, take {8 * values / 1e9:.0f} GB, and this "
                         f"machine has {memory / 1e9:.0f} GB")  # fmt: skip
    if is_converted(path):
        section, params = stored.load(path)
    else:
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        source = convert.model_config(checkpoint.config, shapes, lambda name: checkpoint.tensors[name].read())
        section = source.model
        params = convert.convert(shapes, lambda name: checkpoint.tensors[name].read(), section, "float32", source.format)
    section = ConfigDict(section.to_dict() | {"dtype": "float32"})
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    layers = tuple(llama.of_layer(params, index) for index in range(section.depth))
    outer = {name: value for name, value in params.items() if name not in layers[0]}
    steps = llama.steps(section)

    def loss(outer: Any, h_TD: Array, tokens_T: Array) -> Array:
        logits_TV = steps.read_out(outer, h_TD[None, :-1])[0]
        picked_T = jnp.take_along_axis(logits_TV, tokens_T[1:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits_TV, axis=1) - picked_T)

    return Decoder(
        section,
        outer,
        layers,
        jax.jit(steps.embed),
        jax.jit(lambda layer, h_BTD: steps.layer(layer, h_BTD)[0]),
        jax.jit(steps.layer),
        jax.jit(lambda outer, h_BTD, tokens_BT: jax.lax.map(lambda one: loss(outer, *one), (h_BTD, tokens_BT))),
    )


def tokens(made: Tokenizer, options: Compression, say: Callable[[str], object]) -> Tokens:
    """Text in the model's own tokens, documents in a random order and a blank line between them.

    Raises `GcjaxError` for a text that is too short, or cannot be read.
    """
    source = "files" if options.files else "wiki-summaries"
    corpus = documents.open_corpus(source, options.files, None, say)
    found, digest = [], hashlib.sha256()
    wanted = (options.calibration, options.held_out)
    for name, part, count in zip(("calibration", "held-out"), text.splits(source, corpus, options.valid_fraction), wanted):
        every = [document for _, document in zip(range(_MOST_DOCUMENTS), part.documents())]
        order = np.random.default_rng(options.seed).permutation(len(every))
        ids, sequences = [], max(count // options.length, 1)
        for at in order:
            ids += made.encode(every[at] + "\n\n", add_special_tokens=False).ids
            if len(ids) >= sequences * options.length:
                break
        else:
            raise GcjaxError(
                f"the {name} part of {corpus.origin} has {len(ids)} tokens, and {sequences * options.length} are asked for in "
                f"sequences of {options.length}; give more text, or smaller --{name} and --length"
            )
        found.append(np.asarray(ids[: sequences * options.length], np.int32).reshape(sequences, -1))
        digest.update(found[-1].tobytes())
    provenance = {"name": source, "origin": corpus.origin, "licence": corpus.licence, "sha256": digest.hexdigest()}
    return Tokens(found[0], found[1], provenance)


def embed(model: Decoder, tokens_BT: Int32[np.ndarray, "B T"]) -> Float[np.ndarray, "B T D"]:
    """The hidden states before the first layer."""
    return np.asarray(model.embed(model.outer, tokens_BT))


def through(
    model: Decoder, index: int, h_BTD: Float[np.ndarray, "B T D"], changed: Mapping[str, Float[np.ndarray, "I O"]] | None = None
) -> Float[np.ndarray, "B T D"]:
    """The hidden states after one layer, with kernels in place of its own; a few sequences at a time."""
    layer = model.layers[index] | {name: jnp.asarray(kernel_IO) for name, kernel_IO in (changed or {}).items()}
    return np.concatenate([np.asarray(model.layer(layer, h_BTD[at : at + AT_ONCE])) for at in range(0, len(h_BTD), AT_ONCE)])


def read_out(model: Decoder, h_BTD: Float[np.ndarray, "B T D"], tokens_BT: Int32[np.ndarray, "B T"]) -> Float[np.ndarray, "B"]:
    """Mean loss of each sequence, nats a token, from the hidden states after the last layer."""
    return np.asarray(model.losses(model.outer, h_BTD, tokens_BT), np.float64)


class Calibrated(NamedTuple):
    """What one layer did with a text."""

    roots: dict[str, Float[np.ndarray, "I I"]]  # `sharing.root` of its inputs' second moments, by `llama.INPUT_OF`'s names
    influence: float  # block influence (arXiv 2403.03853), 1 - mean cos(h before, h after)


def calibrate(model: Decoder, tokens_BT: Int32[np.ndarray, "B T"], ridge: float) -> Iterator[Calibrated]:
    """Layer after layer, in one pass over the text; moments in float64 on the host."""
    h_BTD = embed(model, tokens_BT)
    for layer in model.layers:
        moments: dict[str, np.ndarray] = {}
        cosine, after = 0.0, []
        for start in range(0, len(h_BTD), AT_ONCE):
            now_BTD = h_BTD[start : start + AT_ONCE]
            next_BTD, given = model.given(layer, now_BTD)
            after.append(np.asarray(next_BTD))
            for name, x_BTI in given.items():
                x_NI = np.asarray(x_BTI, np.float64).reshape(-1, x_BTI.shape[-1])
                moments[name] = moments.get(name, 0.0) + x_NI.T @ x_NI
            norms = np.linalg.norm(now_BTD, axis=-1) * np.linalg.norm(after[-1], axis=-1)
            cosine += float(np.sum(np.sum(now_BTD * after[-1], axis=-1) / norms))
        roots = {name: sharing.root(moment_II, ridge).astype(np.float32) for name, moment_II in moments.items()}
        yield Calibrated(roots, 1 - cosine / tokens_BT.size)
        h_BTD = np.concatenate(after)
