"""Results go to disk whole or not at all, and come back bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from synthetic import Point, study

from gcjax import results
from gcjax.errors import GcjaxError


@pytest.fixture(scope="module")
def dataset():
    """Two variants at two gains, one run diverged, one unfinished: NaN, strings, flags, a swept hyperparameter."""
    points = [
        Point("Res+ReLU", swept={"model.init_gain": 0.1}),
        Point("Res+None", swept={"model.init_gain": 1.0}, statuses=("diverged", "unfinished")),
    ]
    made = study(points, seeds=2, layers=3, ranks=2)
    made.attrs |= {"git_revision": "", "device": "1 x µ-device", "wall_seconds": 0.1 + 0.2}
    return made


@pytest.fixture
def saved(dataset, tmp_path):
    return results.save(dataset, tmp_path / "results.nc")


def _assert_identical(one: xr.Dataset, other: xr.Dataset):
    xr.testing.assert_identical(one, other)
    assert set(one.variables) == set(other.variables)
    for name in one.variables:
        a, b = one[name], other[name]
        assert a.dims == b.dims, name
        assert a.dtype.kind == b.dtype.kind, name
        if a.dtype.kind in "fiu":
            assert a.dtype == b.dtype, name
            assert a.values.tobytes() == b.values.tobytes(), name
        else:
            assert a.values.tolist() == b.values.tolist(), name


def test_what_is_saved_comes_back_bit_for_bit(dataset, saved):
    loaded = results.load(saved)
    _assert_identical(dataset, loaded)
    assert loaded.attrs == dataset.attrs
    assert json.loads(loaded.attrs["config"]) == json.loads(dataset.attrs["config"])
    assert np.isnan(loaded.cosine).any()
    assert loaded.flagged.dtype == np.int8


def test_nan_infinity_and_the_smallest_numbers_survive(dataset, tmp_path):
    odd = dataset.copy(deep=True)
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, np.finfo(np.float32).max], np.float32)
    odd.loss.values.flat[: len(values)] = values
    loaded = results.load(results.save(odd, tmp_path / "results.nc"))
    assert loaded.loss.values.tobytes() == odd.loss.values.tobytes()


def test_a_directory_stands_for_the_file_in_it(dataset, saved):
    _assert_identical(dataset, results.load(saved.parent))
    _assert_identical(dataset, results.load(str(saved)))


def test_saving_makes_the_directory_replaces_the_file_and_leaves_nothing_else(dataset, tmp_path):
    path = tmp_path / "deep" / "down" / "results.nc"
    results.save(dataset, path)
    longer = dataset.copy(deep=True)
    longer.attrs["device"] = "another"
    assert results.save(longer, path) == path
    _assert_identical(longer, results.load(path))
    assert os.listdir(path.parent) == ["results.nc"]
    assert path.stat().st_mode & 0o777 == 0o644, "others may read it"


def test_the_file_is_plain_netcdf(dataset, saved):
    """For whoever has no gcjax: the netCDF-4 layout of HDF5, compressed, with named dimensions."""
    assert saved.read_bytes()[1:4] == b"HDF"
    with xr.open_dataset(saved, engine="h5netcdf") as handle:
        assert handle.cosine.dims == results.SCHEMA["cosine"]
        assert handle.cosine.encoding["zlib"]
    assert saved.stat().st_size < sum(x.nbytes for x in dataset.variables.values()) / 2 + 200_000


@pytest.mark.parametrize("name", results.SCHEMA)
def test_a_missing_variable_is_named(dataset, name):
    with pytest.raises(GcjaxError, match=rf"mine is not a complete gcjax result; missing: variable {name} over"):
        results.check(dataset.drop_vars(name), "mine")


@pytest.mark.parametrize("name", [name for name in results.ATTRIBUTES if name not in ("format", "kind")])
def test_a_missing_attribute_is_named(dataset, name):
    short = dataset.copy()
    del short.attrs[name]
    with pytest.raises(GcjaxError, match=rf"mine is not a complete gcjax result; missing: attribute {name}"):
        results.check(short, "mine")


@pytest.mark.parametrize("name", results.RUN_COORDS)
def test_a_missing_coordinate_is_named(dataset, name):
    with pytest.raises(GcjaxError, match=rf"missing: coordinate {name}"):
        results.check(dataset.drop_vars(name), "mine")


def test_a_file_from_which_something_is_missing_is_refused_with_all_of_it(dataset, tmp_path):
    short = dataset.drop_vars(["gap", "seed"])
    del short.attrs["data"]
    path = results.save(short, tmp_path / "results.nc")
    missing = "missing: attribute data; coordinate seed; variable gap over"
    with pytest.raises(GcjaxError, match=rf"^{path} is not a complete gcjax result; {missing}"):
        results.load(path)


def test_axes_in_another_order_are_refused(dataset):
    with pytest.raises(GcjaxError, match="missing: variable loss over"):
        results.check(dataset.assign(loss=dataset.loss.transpose("step", "run")), "mine")


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        *(("format", value, r"mine is not a gcjax result of format 3: its attribute 'format' is {!r}")
          for value in (None, 0, 2, results.FORMAT + 1)),
        *(("kind", value, "mine is of no kind that gcjax knows: {!r}") for value in (None, "studies")),
    ],
)  # fmt: skip
def test_another_format_or_kind_is_refused(dataset, attribute, value, message):
    other = dataset.copy()
    del other.attrs[attribute]
    other.attrs |= {} if value is None else {attribute: value}
    with pytest.raises(GcjaxError, match=message.format(value)):
        results.check(other, "mine")


def test_a_variable_that_the_schema_does_not_know_is_refused(dataset):
    with pytest.raises(GcjaxError, match=r"results of kind study have no variable cosines; gcjax/results\.py lists them"):
        results.dataset({"cosines": dataset.cosine.values}, dataset.coords, dataset.attrs)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(GcjaxError, match=r"results\.nc does not exist; 'gcjax train' and 'gcjax measure' write it"):
        results.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not netCDF at all", b"\x89HDF\r\n\x1a\n", b"\0" * 5000])
def test_a_file_that_is_not_netcdf_is_named(tmp_path, content):
    path = tmp_path / "results.nc"
    path.write_bytes(content)
    with pytest.raises(GcjaxError, match=r"results\.nc cannot be read as netCDF"):
        results.load(path)


def test_netcdf_of_another_origin_is_refused(tmp_path):
    path = tmp_path / "results.nc"
    xr.Dataset({"x": ("t", [1.0])}).to_netcdf(path, engine="h5netcdf")
    with pytest.raises(GcjaxError, match=r"results\.nc is not a gcjax result of format 3: its attribute 'format' is None"):
        results.load(path)


# h5netcdf complains once more when it drops a file that it could not open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_truncated_file_is_named_wherever_it_ends(saved):
    whole = saved.read_bytes()
    for size in np.linspace(1, len(whole) - 1, 16).astype(int):
        saved.write_bytes(whole[:size])
        with pytest.raises(GcjaxError, match=r"results\.nc cannot be read as netCDF"):
            results.load(saved)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_file_is_named_or_read_right_and_ends_nothing(dataset, saved):
    whole, rng, refused = saved.read_bytes(), np.random.default_rng(0), 0
    for start in rng.integers(0, len(whole) - 64, 24):
        damaged = bytearray(whole)
        damaged[start : start + 64] = rng.bytes(64)
        saved.write_bytes(bytes(damaged))
        try:
            loaded = results.load(saved)
        except GcjaxError:
            refused += 1
        else:
            assert loaded.cosine.values.tobytes() == dataset.cosine.values.tobytes()
    assert refused > 3


def test_a_directory_that_cannot_be_made_or_written_is_named(dataset, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(GcjaxError, match=r"cannot write .*results\.nc: .*free space or permissions"):
        results.save(dataset, tmp_path / "file" / "results.nc")
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / "results.nc").mkdir()
    with pytest.raises(GcjaxError, match=r"cannot write .*results\.nc: "):
        results.save(dataset, tmp_path / "results.nc")
    assert sorted(os.listdir(tmp_path)) == ["file", "results.nc"], "no scratch file stays behind"


def test_the_old_file_stands_until_the_new_one_is_whole(dataset, saved, monkeypatch):
    """Whatever stops the last move, a power cut included, finds one of the two."""
    old = saved.read_bytes()

    def stopped(scratch, path):
        assert path.read_bytes() == old
        _assert_identical(dataset, xr.load_dataset(scratch, engine="h5netcdf"))
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(GcjaxError, match=r"cannot write .*results\.nc: Input/output error"):
        results.save(dataset, saved)
    assert saved.read_bytes() == old
    assert os.listdir(saved.parent) == ["results.nc"]


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_named(dataset, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(GcjaxError, match=r"cannot write .*results\.nc: Permission denied"):
        results.save(dataset, closed / "results.nc")


# Saves to a disk that is full; the old results, what was said and what lies about afterwards go to standard output.
SAVE = """
import json, os, resource, signal, sys
from pathlib import Path
import numpy as np, xarray as xr
from gcjax import results
from gcjax.errors import GcjaxError

path, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
noise = np.random.default_rng(0).standard_normal((500, 500))
try:
    results.save(xr.Dataset({"noise": (("x", "y"), noise)}), path)
    said = "nothing"
except GcjaxError as error:
    said = str(error)
print(json.dumps({"said": said, "old": path.read_bytes().decode("latin1"), "there": os.listdir(path.parent)}))
"""


def _save_in_subprocess(path, limit=0):
    """In a process of its own: HDF5 may end the whole process when a write fails, even long after it did."""
    path.write_bytes(b"the old results")
    command = [sys.executable, "-W", "error", "-c", SAVE, str(path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"ended by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else done.stderr
    return json.loads(done.stdout)


def _assert_refused_and_nothing_lost(told, reason):
    assert f"results.nc: {reason}; free space or permissions" in told["said"]
    assert told["old"] == "the old results"
    assert told["there"] == ["results.nc"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
@pytest.mark.parametrize("limit", [4096, 1_000_000])
def test_a_file_that_may_not_grow_is_refused_and_nothing_is_lost(tmp_path, limit):
    _assert_refused_and_nothing_lost(_save_in_subprocess(tmp_path / "results.nc", limit), "File too large")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 kB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
        mounted = subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no permission to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], timeout=60, check=True)


def test_a_full_disk_is_refused_and_nothing_is_lost(small_disk):
    _assert_refused_and_nothing_lost(_save_in_subprocess(small_disk / "results.nc"), "No space left on device")
    assert _free(small_disk) > 200_000, "the space is given back"


def _free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
