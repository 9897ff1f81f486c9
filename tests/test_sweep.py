"""Points to runs to groups to packs: nothing lost, nothing twice, and nothing in a group that needs another program."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from gcjax import config as configs
from gcjax.errors import GcjaxError
from gcjax.training import sweep

STUDY = str(Path(__file__).parents[1] / "configs" / "mlp_ablation.py")
PRESETS = ("quick", "paper", "init_scale", "optimizer", "normalization")
# Fields outside TRACED that need a program of their own, with another value for each.
STATIC = {
    "model": {"depth": 7, "width": 31, "residual": False, "activation": "tanh", "normalization": "layernorm"}
    | {"form": "w_act", "bias": True},
    "optim": {"name": "sgd", "schedule": "cosine", "warmup": 3, "eps": 1e-3, "nesterov": True, "clip_norm": 1.0},
    "train": {"steps": 17, "batch_size": 5},
    "measure": {"rank": 2, "solver": "svd", "activity": 8},
}
TRACED = {
    "model": {"init_gain": 0.7, "residual_scale": 0.5, "activation_scale": 2.0, "activation_shift": 0.1, "negative_slope": 0.2},
    "optim": {"lr": 0.2, "b1": 0.8, "b2": 0.7, "momentum": 0.6, "weight_decay": 0.1},
}
LEAVES = [(section, name) for section, fields in STATIC.items() for name in fields]


BASE = configs.load(STUDY)


def _config(*points, **changes):
    config = BASE.copy_and_resolve_references().unlock()
    config.points = points
    config.update(changes)
    return config


def _identity(runs):
    return [(run.point, run.variant, run.seed) for run in runs]


@st.composite
def studies(draw):
    """Up to six points that change up to three fields, static and traced, and up to four seeds."""
    fields = [(s, n, v) for table in (STATIC, TRACED) for s, values in table.items() for n, v in values.items()]
    points = []
    for i in range(draw(st.integers(1, 6))):
        point = {"point": f"p{i}", "variant": draw(st.sampled_from("ab"))}
        for section, name, value in draw(st.lists(st.sampled_from(fields), max_size=3)):
            point.setdefault(section, {})[name] = value
        points.append(point)
    return _config(*points, seeds=draw(st.integers(1, 4)), first_seed=draw(st.integers(0, 9)))


@given(config=studies(), width=st.integers(1, 9))
def test_packs_hold_every_run_once_in_order_and_share_their_program(config, width):
    listed = sweep.runs(config)
    packs = sweep.packs(listed, width)
    assert sorted(_identity(run for pack in packs for run in pack.runs)) == sorted(_identity(listed))
    for pack in packs:
        assert 1 <= len(pack.runs) <= width
        assert [listed.index(run) for run in pack.runs] == sorted(listed.index(run) for run in pack.runs)
        assert all(sweep.static(run.config) == pack.static for run in pack.runs)
    statics = list(dict.fromkeys(sweep.static(run.config) for run in listed))
    assert list(dict.fromkeys(pack.static for pack in packs)) == statics, "groups in the order of their first run"
    for static in statics:
        group = [pack for pack in packs if pack.static == static]
        members = [run for run in listed if sweep.static(run.config) == static]
        assert len(group) == math.ceil(len(members) / width), "packs are full but for the last one"
        assert _identity(run for pack in group for run in pack.runs) == _identity(members)
    assert len({pack.name for pack in packs}) == len(packs)


@given(config=studies(), widths=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_the_width_loses_no_run_and_changes_no_config(config, widths):
    one, other = (
        {(run.point, run.seed): run.config for pack in sweep.packs(sweep.runs(config), width) for run in pack.runs}
        for width in widths
    )
    assert one == other


@given(config=studies())
def test_runs_are_points_times_seeds_and_leave_the_base_alone(config):
    before = config.to_json()
    listed = sweep.runs(config)
    seeds = range(config.first_seed, config.first_seed + config.seeds)
    assert [(run.point, run.seed) for run in listed] == [(p["point"], seed) for p in config.points for seed in seeds]
    for run in listed:
        run.config.model.width = 12345  # a run's config is its own
        run.config.measure.early = (9,)
    assert config.to_json() == before
    sweep.packs(sweep.runs(config), 2)
    assert config.to_json() == before


@given(config=studies())
def test_a_pack_with_its_traced_fields_bound_is_its_runs_config_again(config):
    for pack in sweep.packs(sweep.runs(config), 3):
        traced = pack.traced()
        assert set(traced) == set(sweep.traced(pack.runs[0].config)) == set(sweep.TRACED) - {"model.init_std"}
        for i, run in enumerate(pack.runs):
            bound = sweep.bind(pack.static, {path: values[i] for path, values in traced.items()})
            theirs = {path: configs.get(run.config, path) for path, _ in configs.leaves(bound)}
            assert set(traced) < set(theirs)
            assert json.dumps(dict(configs.leaves(bound))) == json.dumps(theirs)


def test_a_point_changes_what_it_names_and_nothing_else():
    base, (run,) = (
        _config(),
        sweep.runs(_config({"point": "p", "optim": {"lr": 0.5}, "model": {"bias": True}}, seeds=1)),
    )
    theirs = dict(configs.leaves(base.model)) | {"bias": True}
    assert dict(configs.leaves(run.config.model)) == theirs
    assert dict(configs.leaves(run.config.optim)) == dict(configs.leaves(base.optim)) | {"lr": 0.5}
    assert run.variant == "p", "named after the point where the config names no variant"


@pytest.mark.parametrize(("section", "name"), LEAVES)
def test_a_static_field_makes_a_group_of_its_own(section, name):
    config = _config({"point": "a"}, {"point": "b", section: {name: STATIC[section][name]}}, seeds=2)
    assert len({pack.static for pack in sweep.packs(sweep.runs(config), 8)}) == 2


def test_every_field_that_can_be_traced_is():
    of_the_mlp = set(sweep.TRACED) - {"model.init_std"}
    assert of_the_mlp == {f"{section}.{name}" for section, fields in TRACED.items() for name in fields}


@pytest.mark.parametrize("path", [f"{section}.{name}" for section, fields in TRACED.items() for name in fields])
def test_seeds_and_traced_fields_share_a_group(path):
    section, name = path.split(".")
    config = _config({"point": "a"}, {"point": "b", section: {name: TRACED[section][name]}}, seeds=2)
    (pack,) = sweep.packs(sweep.runs(config), 8)
    assert [run.seed for run in pack.runs] == [0, 1, 0, 1]
    base = configs.get(config, path)
    assert pack.traced()[path] == [base, base, TRACED[section][name], TRACED[section][name]]


def test_fields_of_the_study_make_no_group():
    one, other = (
        sweep.static(sweep.runs(_config({"point": "a", "variant": name}, seeds=seeds, first_seed=seeds))[0].config)
        for name, seeds in (("x", 1), ("y", 5))
    )
    assert one == other
    assert hash(one) == hash(other)


def test_what_differs_between_runs_is_swept():
    points = ({"point": "a", "variant": "x"}, {"point": "b", "variant": "y", "optim": {"lr": 0.5}}, {"point": "c"})
    assert sweep.swept(sweep.runs(_config(*points))) == ["optim.lr"]
    assert sweep.swept(sweep.runs(_config(points[0]))) == []
    assert sweep.swept([]) == []


def test_a_config_without_points_is_one_point():
    assert _identity(sweep.runs(_config(seeds=2))) == [("base", "base", 0), ("base", "base", 1)]
    assert _identity(sweep.runs(_config(seeds=1, variant="mine"))) == [("mine", "mine", 0)]


def test_only_takes_the_points_it_names_in_the_study_s_order():
    points = tuple({"point": name} for name in "abc")
    config = _config(*points, seeds=1, only=("c", "a"))
    assert [run.point for run in sweep.runs(config)] == ["a", "c"]
    alone, among = (sweep.runs(_config(*points, seeds=2, only=only)) for only in (("b",), ()))
    assert _identity(alone) == [("b", "b", 0), ("b", "b", 1)]
    same = [run for run in among if run.point == "b"]
    assert [sweep.static(run.config) for run in alone] == [sweep.static(run.config) for run in same]


@pytest.mark.parametrize(
    ("points", "changes", "message"),
    [
        (({"point": "relu"},), {"only": ("rellu",)}, "only='rellu' is not a point of this study; did you mean 'relu'"),
        (
            ({"point": "a", "modl": {}},),
            {},
            "point 'a' sets modl, which the config does not have; did you mean 'model'",
        ),
        (({"point": "a", "optim": {"lrr": 1.0}},), {}, "point 'a' sets optim.lrr, .*; did you mean 'lr'"),
        (({"point": "a", "model": {"depth": 2.5}},), {}, r"point 'a' sets model.depth=2.5; it must be like 16"),
        (({"point": "a", "model": {"residual": 1}},), {}, "point 'a' sets model.residual=1; it must be like True"),
        (({"point": "a", "model": 3},), {}, "point 'a' sets model=3"),
        (({"point": "a", "optim": {"lr": {"x": 1}}},), {}, "point 'a' sets optim.lr={'x': 1}; it must be like 0.001"),
        (({"point": "a"}, {"point": "a"}), {}, "every point needs a name of its own, as 'point'; these have 'a', 'a'"),
        (({"variant": "a"},), {}, "every point needs a name of its own, as 'point'; these have None"),
        (({"point": "a"},), {"seeds": 0}, "seeds=0 leaves nothing to run; give at least 1"),
        (({"point": "a"},), {"seeds": -3}, "seeds=-3 leaves nothing to run"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_one_sentence(points, changes, message):
    with pytest.raises(GcjaxError, match=message):
        sweep.runs(_config(*points, **changes))


VARIANTS = {
    "quick": ["NoRes+tanh", "Res+None", "Res+Radial", "Res+ReLU"],
    "paper": [
        *("NoRes+tanh", "Res+tanh g=1", "NoRes+None", "Res+None g=1", "NoRes+ReLU", "Res+ReLU g=1.41"),
        *("Res+None", "Res+Radial", "Res+ReLU", "Res+GELU", "Res+SiLU", "Res+tanh", "Res+LN+None", "Res+LN+ReLU"),
    ],
    "init_scale": [f"{v} g={g}" for v in ("Res+None", "Res+ReLU") for g in ("0.03", "0.1", "0.3", "0.577", "1")],
    "optimizer": [
        f"{v} {o}"
        for o in ("adam", "adam b2=0", "adam b1=b2=0", "sgd", "momentum", "muon")
        for v in ("Res+None", "Res+Radial", "Res+ReLU")
    ],
    "normalization": ["Res+None", "Res+ReLU", "Res+LN+None", "Res+LN+ReLU", "Res+LNa+None", "Res+LNa+ReLU"],
}
SEEDS = {"quick": 3, "paper": 10, "init_scale": 3, "optimizer": 3, "normalization": 5}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_lists_its_variants_in_the_paper_s_order(preset):
    listed = sweep.runs(configs.load(f"{STUDY}:{preset}"))
    assert [run.point for run in listed[:: SEEDS[preset]]] == VARIANTS[preset]
    assert len(listed) == len(VARIANTS[preset]) * SEEDS[preset]
    assert {run.seed for run in listed} == set(range(SEEDS[preset]))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_variant_s_name_says_what_its_model_is(preset):
    activations = {"None": "none", "Radial": "radial", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "tanh": "tanh"}
    for run in sweep.runs(configs.load(f"{STUDY}:{preset}")):
        skip, *norm, activation = run.variant.split("+")
        model, point = run.config.model, run.point.removeprefix(run.variant)
        assert model.residual is {"Res": True, "NoRes": False}[skip]
        assert model.normalization == {"": "none", "LN": "layernorm", "LNa": "layernorm_affine"}["".join(norm)]
        assert model.activation == activations[activation]
        if point.startswith(" g="):
            assert model.init_gain == pytest.approx(float(point[3:]), abs=5e-3)
        elif skip == "Res":
            assert model.init_gain == 0.1
        if preset == "optimizer":
            assert run.config.optim.name == point.split()[0]
            assert (run.config.optim.b2 == 0) == ("b2=0" in point)
            assert (run.config.optim.b1 == 0) == ("b1=" in point)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_survives_json(preset):
    """What a workdir records is what its workers train."""
    config = configs.load(f"{STUDY}:{preset}")
    again = ConfigDict(json.loads(json.dumps(config.to_dict())))
    for width in (1, 4):
        one, other = (sweep.packs(sweep.runs(c), width) for c in (config, again))
        assert [pack.name for pack in one] == [pack.name for pack in other]
        assert [pack.static for pack in one] == [pack.static for pack in other]
        assert [pack.traced() for pack in one] == [pack.traced() for pack in other]
        for a, b in zip(one, other):
            assert _identity(a.runs) == _identity(b.runs)


def test_controls_without_residuals_stand_beside_their_twin_at_the_same_gain():
    points = {run.point: run.config.model for run in sweep.runs(configs.load(f"{STUDY}:paper"))}
    for control, twin in (
        ("NoRes+tanh", "Res+tanh g=1"),
        ("NoRes+None", "Res+None g=1"),
        ("NoRes+ReLU", "Res+ReLU g=1.41"),
    ):
        without, beside = points[control].to_dict(), points[twin].to_dict()
        assert without.pop("residual") is False
        assert beside.pop("residual") is True
        assert without == beside
