"""The tokenizer that a checkpoint carries: tokenizer.json, or of a GGUF file the byte-level BPE in it, as SmolLM's."""

import os
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gcjax.errors import GcjaxError, nearest
from gcjax.pretrained import files

# llama.cpp's names of the ways to cut a text into words before merging: SmolLM takes every digit by itself.
PRE_TOKENIZERS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}
_CONTROL, _USER_DEFINED = 3, 4  # token types that are found in a text before anything else


def of_checkpoint(path: Path, format: str) -> tokenizers.Tokenizer:
    """The tokenizer beside or in a checkpoint; raises `GcjaxError` where there is none that can be built."""
    if format == "gguf":
        return from_gguf(path)
    file = (path if path.is_dir() else path.parent) / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # of the package's own, which is no subclass
        raise GcjaxError(f"{file} cannot be read ({error})") from error


def from_gguf(path: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file or directory; it adds no tokens at the beginning or the end.

    Raises `GcjaxError` where the file has none, or one of another kind than `PRE_TOKENIZERS` has.
    """
    kind, cut = (files.gguf_field(path, f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != "gpt2" or cut not in PRE_TOKENIZERS:
        hint = nearest(cut, PRE_TOKENIZERS) if kind == "gpt2" else "only gpt2 is"
        raise GcjaxError(f"{path} has a tokenizer of the kind {kind!r}, {cut!r}, which is not built; {hint}")
    tokens, merges, types = (files.gguf_field(path, f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        made = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    except Exception as error:  # of the package's own, which is no subclass
        raise GcjaxError(f"{path} has a tokenizer that does not fit together ({error}); download it again") from error
    made.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[cut])
    made.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ in (_CONTROL, _USER_DEFINED):
            made.add_tokens([tokenizers.AddedToken(token, special=type_ == _CONTROL, normalized=False)])
    return made
