"""Where results come from: package versions, device, commit."""

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import jax

PACKAGES = ("gcjax", "jax", "jaxlib", "flax", "optax", "numpy")


def origin() -> dict[str, str]:
    """The attributes of results that say what made them."""
    versions = {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}
    devices = jax.local_devices()
    return {
        "versions": json.dumps(versions),
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "git_revision": git_revision(),
    }


def git_revision() -> str:
    """The commit of the checkout this package runs from, `+` behind it when files differ; empty outside a checkout."""
    try:
        here = ["git", "-C", str(Path(__file__).parent)]
        commit = subprocess.run([*here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*here, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
        return commit + ("+" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
