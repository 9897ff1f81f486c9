"""Language modelling: `models.llama` on windows of a text's tokens (`data.text`).

A batch is `batch_size` windows of `window` tokens and the one after each; their places follow from the run's key and the
step alone. The corpus is on the device where it fits; else the host gathers each chunk's windows (`gcjax.training.feed`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax.data import text
from gcjax.errors import GcjaxError
from gcjax.models import llama
from gcjax.training.problem import Problem

MOST_TOKENS = 2**31 - 1  # places in the corpus are drawn as int32


def load_data(config: Any, say: Callable[[str], object]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """As `problem.load_data`: `train` [T] and `valid`, windows [N, window + 1], evenly over the validation split."""
    *parts, (_, total) = llama.parameters_per_part(config.model).items()
    say(f"{total:,} parameters a run: " + ", ".join(f"{part} {count:,}" for part, count in parts if count))
    loaded = text.load(config.data.source, config.data.files, config.data.vocabulary, config.data.valid_fraction, report=say)
    window = config.train.window
    text.check_window(loaded, window)
    if len(loaded.train_T) > MOST_TOKENS:
        raise GcjaxError(
            f"the corpus has {len(loaded.train_T)} tokens; places in it are drawn as int32, so {MOST_TOKENS} at most"
        )
    count = min(config.measure.valid_windows, (len(loaded.valid_T) - 1) // window)
    starts_N = np.linspace(0, len(loaded.valid_T) - window - 1, count).astype(np.int64)
    return {"train": loaded.train_T, "valid": gather(loaded.valid_T, starts_N, window)}, dict(loaded.provenance)


def starts(config: Any, key: jax.Array, step: jax.Array, tokens: int) -> jax.Array:
    """Where the windows of a step's batch begin in a corpus of `tokens`, `[B]`."""
    key, window = jax.random.fold_in(key, step), config.train.window
    return jax.random.randint(key, (config.train.batch_size,), 0, tokens - window)


def gather(tokens_T: Any, starts_B: Any, window: int) -> Any:
    """Windows `[B, window + 1]`, by NumPy or on the device."""
    return tokens_T[starts_B[..., None] + np.arange(window + 1)]


def build(config: Any) -> Problem:
    """The problem of a bound config (traced fields may be tracers)."""
    model = llama.build(config.model)
    window, longest = config.train.window, config.model.max_length
    if 0 < longest < window:
        raise GcjaxError(f"train.window={window} is longer than model.max_length={longest}; shorten it, or raise max_length")
    if config.model.vocabulary != config.data.vocabulary:
        raise GcjaxError(f"model.vocabulary={config.model.vocabulary} is not that of the tokens, "
                         f"data.vocabulary={config.data.vocabulary}; set the latter alone")  # fmt: skip

    def batch(data: Any, key: Any, step: Any) -> Any:
        if "windows" in data:  # [S, B, T + 1], from step `first` on
            return jax.lax.dynamic_index_in_dim(data["windows"], step - data["first"], keepdims=False)
        return gather(data["train"], starts(config, key, step, len(data["train"])), config.train.window)

    def cross_entropy(params: Any, window_BT: Any) -> tuple[Any, Any]:
        window_BT = window_BT.astype(jnp.int32)
        logits_BTV = model.apply(params, window_BT[:, :-1]).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, window_BT[:, 1:]).mean()
        return loss, (logits_BTV.argmax(axis=-1) == window_BT[:, 1:]).mean()

    def evaluate(params: Any, data: Any) -> dict[str, Any]:
        """Window by window, so that no more logits are in memory than a step has."""
        loss_N, right_N = jax.lax.map(lambda window_T: cross_entropy(params, window_T[None]), data["valid"],
                                      batch_size=min(config.train.batch_size, len(data["valid"])))  # fmt: skip
        loss = loss_N.mean()
        return {"test_loss": loss, "test_accuracy": jnp.where(jnp.isfinite(loss), right_N.mean(), jnp.nan)}

    return Problem(
        init=model.init,
        batch=batch,
        loss=lambda params, window_BT: cross_entropy(params, window_BT)[0],
        evaluate=evaluate,
        stacks=model.stacks,
        roles=model.roles,
        activity=lambda *_: {},
        microbatches=config.train.microbatches,
    )


def flops_per_token(config: Any) -> float:
    """Floating-point operations of one token's forward and backward pass, `6 N + 6 L H E T` (arXiv 2204.02311, appendix B):
    N counts the parameters that tokens are multiplied with, the head among them; attention is causal, so half of T."""
    model = config.model
    counts = llama.parameters_per_part(model)
    multiplied = counts["attention"] + counts["mlp"] + model.vocabulary * model.width
    return 6.0 * multiplied + 6.0 * model.depth * model.heads * model.head_dim * config.train.window
