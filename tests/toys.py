"""Studies at toy size, the transformer's on a few paragraphs of prose; a checkpoint of a toy Llama; four devices to run on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from matrices import frame, matrix
from safetensors.numpy import save_file

from gcjax.data import text

CONFIGS = Path(__file__).parent.parent / "configs"
MLP, LLAMA = f"{CONFIGS / 'mlp_ablation.py'}:quick", f"{CONFIGS / 'llama_wikitext.py'}:mini"
TOY_MLP = ("model.depth=3", "model.width=24", "measure.rank=4", "train.steps=40", "train.chunk=10", "measure.every=20",
           "measure.early=(0,5)", "seeds=3", "only=Res+ReLU", "checkpoint.seconds=0.0")  # fmt: skip
TOY_LLAMA = ("model.depth=2", "model.width=16", "model.heads=2", "model.key_value_heads=2", "model.head_dim=8",
             "model.mlp_width=24", "data.source=files", "data.vocabulary=300", "data.valid_fraction=0.3", "train.window=16",
             "train.batch_size=4", "train.steps=24", "train.chunk=6", "optim.warmup=4", "measure.rank=4",
             "measure.early=(0,3)", "measure.every=12", "measure.full=2", "measure.valid_windows=9", "seeds=1",
             "only=SiLU")  # fmt: skip
NAMES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
         "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip
PROSE = """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.
However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well
fixed in the minds of the surrounding families, that he is considered the rightful property of some one or other of their
daughters.

Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing
particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is a way
I have of driving off the spleen and regulating the circulation.

It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was the
epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it was the
spring of hope, it was the winter of despair, we had everything before us, we had nothing before us.

When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution of the inhabitants of
South America, and in the geological relations of the present to the past inhabitants of that continent. These facts seemed
to me to throw some light on the origin of species, that mystery of mysteries.

Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she
had peeped into the book her sister was reading, but it had no pictures or conversations in it, and what is the use of a
book, thought Alice, without pictures or conversations?

Four score and seven years ago our fathers brought forth, on this continent, a new nation, conceived in Liberty, and
dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether that
nation, or any nation so conceived and so dedicated, can long endure.

To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. In his eyes she
eclipses and predominates the whole of her sex. It was not that he felt any emotion akin to love for Irene Adler.
"""


def write_prose(folder: Path) -> Path:
    """PROSE as a corpus of documents in one file."""
    path = folder / "prose.txt"
    path.write_text(PROSE.replace("\n\n", f"\n{text.END}\n"))
    return path


def write_checkpoint(folder: Path, width=48, hidden=80, layers=4, seed=0, gains=0.5) -> dict[str, np.ndarray]:
    """A Llama of random weights whose gate shares an input direction and whose down shares an output direction."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (width, width), "k": (width // 2, width), "v": (width // 2, width), "o": (width, width),
              "gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}  # fmt: skip
    shared = frame(rng, width, 1)[:, 0]
    tensors = {}
    for layer in range(layers):
        for name, (o, i) in shapes.items():
            w_OI = matrix(rng, o, i, 0.9 ** np.arange(min(o, i)))
            if name == "gate":
                w_OI += 3 * np.outer(frame(rng, o, 1), shared)
            if name == "down":
                w_OI += 3 * np.outer(shared, frame(rng, i, 1))
            tensors[f"model.layers.{layer}.{NAMES[name]}.weight"] = w_OI.astype(np.float32)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = np.exp(gains * rng.standard_normal(width)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}))
    return tensors


def run_on_four(command: list[str], timeout: float = 300) -> None:
    """Raises where it fails, and where it has not ended after `timeout` seconds: devices that wait for each other do not."""
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
    # A device that waits for another holds a thread; more of them than cores, lest those that all wait for have none.
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    done = subprocess.run([sys.executable, *command], env=environment, timeout=timeout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
