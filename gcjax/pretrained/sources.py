"""The name of a model -> its files on this machine, opened: a path, a named asset, or `hf:org/name[@revision]`."""

from collections.abc import Callable
from pathlib import Path

from gcjax.data import assets
from gcjax.errors import GcjaxError, nearest
from gcjax.pretrained.directory import FACTORS, is_converted
from gcjax.pretrained.files import Checkpoint, open_checkpoint

# What a checkpoint needs of a repository: no pickles, no consolidated duplicates, no other frameworks' weights.
WANTED = ("config.json", "tokenizer.json", "model*.safetensors", "model.safetensors.index.json")


def resolve(model: str, say: Callable[[str], object]) -> Path:
    """The directory or file of `model`, fetched first where it has to be; `say` gets a sentence before a download.

    Raises `GcjaxError` for a model that is not there, with the nearest name of an asset, and for a failed download.
    """
    if model.startswith("hf:"):
        return _from_hub(model.removeprefix("hf:"), say)
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model in assets.ASSETS:
        return assets.fetch(model, report=say)
    raise GcjaxError(f"there is no file or directory {model}, and no asset of that name ({nearest(model, assets.ASSETS)}); "
                     "a model on the Hugging Face hub is written hf:org/name")  # fmt: skip


def open_model(path: Path) -> Checkpoint:
    """The checkpoint at `path`: safetensors, GGUF, or what `gcjax convert` or `gcjax compress` wrote; raises as
    `files.open_checkpoint` does."""
    if is_converted(path):
        from gcjax.pretrained.stored import open_converted  # brings orbax

        return open_converted(path)
    if (path / FACTORS).is_file():
        from gcjax.pretrained.factored import open_factored

        return open_factored(path)
    return open_checkpoint(path)


def _from_hub(name: str, say: Callable[[str], object]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    repository, _, revision = name.partition("@")
    say(f"{name}: looking for it on the Hugging Face hub, and in its cache")
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(WANTED)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise GcjaxError(f"hf:{name} could not be fetched ({reason}); check the name, the network and, for a gated model, "
                         "'hf auth login'; a directory that is already here can be given by its path")  from error  # fmt: skip
