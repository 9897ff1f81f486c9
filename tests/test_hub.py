"""`hf:org/name[@revision]`, by huggingface_hub itself against a small server that answers as the hub does."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from safetensors.numpy import save_file

from gcjax import results

COMMITS = {"main": "a" * 40, "step100": "b" * 40}
UNWANTED = ("pytorch_model.bin", "README.md", "consolidated.safetensors", "tf_model.h5")


def _write_model(folder: Path, seed: int) -> None:
    """Two layers of one projection each, in two shards, beside what no one needs of a repository."""
    rng, index = np.random.default_rng(seed), {}
    folder.mkdir()
    for layer in range(2):
        shard = f"model-0000{layer + 1}-of-00002.safetensors"
        index[f"model.layers.{layer}.mlp.gate_proj.weight"] = shard
        save_file({name: rng.standard_normal((24, 16), np.float32) for name in index if index[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 2, "hidden_size": 16}))
    for name in UNWANTED:
        (folder / name).write_text("not to be fetched")


@pytest.fixture
def hub(tmp_path):
    """A hub with the model org/tiny at two revisions: its URL, its folders by revision, the names of files it has sent."""
    folders = {revision: tmp_path / revision for revision in COMMITS}
    for seed, folder in enumerate(folders.values()):
        _write_model(folder, seed)
    revisions, sent = {commit: revision for revision, commit in COMMITS.items()}, []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            match = re.fullmatch(r"(/api/models)?/org/tiny/(revision|tree|resolve)/([^/]+)/?(.*)", path)
            if match is None or revisions.get(match[3], match[3]) not in COMMITS:
                return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            revision, name = revisions.get(match[3], match[3]), match[4]
            folder, commit = folders[revision], COMMITS[revision]
            if match[2] != "resolve":
                files = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": commit}
                         for file in sorted(folder.iterdir())]  # fmt: skip
                siblings = [{"rfilename": file["path"]} for file in files]
                found = files if match[2] == "tree" else {"id": "org/tiny", "sha": commit, "siblings": siblings}
                return self.reply(200, json.dumps(found).encode(), {"Content-Type": "application/json"})
            content = (folder / name).read_bytes()
            if self.command == "GET":
                sent.append(name)
            return self.reply(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit})

        def reply(self, status, content, headers):
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folders, sent
        server.shutdown()
        thread.join()


def _measure(model: str, workdir: Path, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    command = [sys.executable, "-m", "gcjax", "measure", model, "--workdir", str(workdir), "--rank", "2", "--formats="]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def _same(one: Path, other: Path) -> None:
    xr.testing.assert_equal(*(results.load(path).drop_attrs() for path in (one, other)))


def test_a_model_on_the_hub_is_measured_as_its_directory_is(hub, tmp_path):
    endpoint, folders, sent = hub
    runs = {name: tmp_path / "runs" / name for name in ("hub", "local", "again", "absent")}
    first = _measure("hf:org/tiny@step100", runs["hub"], endpoint, tmp_path / "home")
    assert first.returncode == 0, first.stderr
    assert sorted(sent) == sorted({file.name for file in folders["step100"].iterdir()} - set(UNWANTED))
    assert _measure(str(folders["step100"]), runs["local"], endpoint, tmp_path / "home").returncode == 0
    _same(runs["hub"], runs["local"])
    # In the cache it is found without the hub; what is not there is not.
    assert _measure("hf:org/tiny@step100", runs["again"], "http://127.0.0.1:9", tmp_path / "home").returncode == 0
    _same(runs["again"], runs["hub"])
    absent = _measure("hf:org/nothing", runs["absent"], endpoint, tmp_path / "home")
    assert absent.returncode == 1
    assert "hf:org/nothing could not be fetched" in absent.stderr
    assert "Traceback" not in absent.stderr
