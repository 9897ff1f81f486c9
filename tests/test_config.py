"""Overrides of every type, what is refused and with which words, and how two configs are told apart."""

import json
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from gcjax import config as configs
from gcjax.__main__ import TRAIN_EXAMPLES
from gcjax.errors import GcjaxError, nearest
from gcjax.training.study import check

STUDY = str(Path(__file__).parents[1] / "configs" / "mlp_ablation.py")

STUDY_OF_EVERY_TYPE = """
from ml_collections import ConfigDict

def get_config(preset="plain"):
    if preset not in ("plain", "other"):
        raise ValueError(f"there is no preset {preset!r}; there are: plain, other")
    return ConfigDict({
        "name": preset, "steps": 10, "rate": 0.5, "on": False, "early": (0, 5), "only": (), "sizes": (0.5, 1.0),
        "model": {"depth": 3, "inner": {"deep": 1.0}},
        "points": ({"point": "a", "model": {"depth": 4}}, {"point": "b", "model": {"depth": 5}, "rate": 0.1}),
    })
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.py"
    path.write_text(STUDY_OF_EVERY_TYPE)
    return str(path)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("steps=20", 20),
        ("steps=1_000", 1000),
        ("rate=3e-4", 3e-4),
        ("rate=2", 2.0),
        ("rate=-1.5", -1.5),
        ("on=true", True),
        ("on=True", True),
        ("on=false", False),
        ("name=other", "other"),
        ("name=5", "5"),
        ("name=true", "true"),
        ("name=", ""),
        ("name=a=b", "a=b"),
        ("early=1,2,3", (1, 2, 3)),
        ("early=(1,2)", (1, 2)),
        ("early=[1,2]", (1, 2)),
        ("early=7", (7,)),
        ("early=()", ()),
        ("only=Res+None", ("Res+None",)),
        ("only=Res+None g=1,Res+ReLU", ("Res+None g=1", "Res+ReLU")),
        ("sizes=0.1,0.2", (0.1, 0.2)),
        ("model.inner.deep=4", 4.0),
    ],
)
def test_an_override_takes_its_field_s_type(study, override, value):
    path = override.partition("=")[0]
    found = configs.get(configs.load(study, [override]), path)
    assert found == value
    assert type(found) is type(value)
    plain = dict(configs.leaves(configs.load(study)))
    changed = dict(configs.leaves(configs.load(study, [override])))
    assert {key for key in plain if plain[key] != changed[key]} <= {path}


def test_the_last_override_wins(study):
    config = configs.load(f"{study}:other", ["steps=1", "rate=0.25", "steps=2"])
    assert (config.name, config.steps, config.rate) == ("other", 2, 0.25)


def test_a_loaded_config_is_locked(study):
    with pytest.raises((AttributeError, KeyError), match="stepz"):
        configs.load(study).stepz = 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "has no field config.stepz; did you mean 'steps'"),
        ("model.dept=3", "has no field config.model.dept; did you mean 'model.depth'"),
        ("model.inner.dep=3", "did you mean 'model.inner.deep'"),
        ("model=3", "has no field config.model; "),
        ("points=()", "has no field config.points; "),
        ("points.0.point=x", "has no field config.points.0.point; "),
        ("points.0.model.depth=9", "did you mean 'model.depth'"),
        (
            "qqq=3",
            "has no field config.qqq; there are: early, model.depth, model.inner.deep, name, on, only, rate, sizes",
        ),
        ("steps", "the override --config.steps has no value; write --config.steps=VALUE"),
        ("steps=1.5", "config.steps=1.5 is not a int, as 10 is"),
        ("steps=many", "config.steps=many is not a int"),
        ("steps=true", "config.steps=true is not a int"),
        ("steps=None", "config.steps=None is not a int"),
        ("steps=", "config.steps= is not a int"),
        ("rate=fast", "config.rate=fast is not a float, as 0.5 is"),
        ("rate=None", "config.rate=None is not a float"),
        ("rate=1,2", "config.rate=1,2 is not a float"),
        ("on=1", "config.on=1 is not a bool, as False is"),
        ("on=yes", "config.on=yes is not a bool"),
        ("early=a,b", "config.early=a,b is not a tuple, as "),
        ("early=0.5,1", "config.early=0.5,1 is not a tuple, as "),
        ("early=None", "config.early=None is not a tuple, as "),
        ("model.depth=7", "config.model.depth=7 would change nothing: every point of .* sets model.depth itself"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(study, override, message):
    with pytest.raises(GcjaxError, match=message):
        configs.load(study, [override])


def test_an_override_that_some_points_leave_free_is_taken(study):
    assert configs.load(study, ["rate=0.125"]).rate == 0.125


def test_a_missing_file_a_bad_preset_and_a_file_that_is_no_config_are_named(tmp_path, study):
    with pytest.raises(GcjaxError, match=r"the config nowhere\.py does not exist; --config takes FILE\.py or FILE\.py:PRESET"):
        configs.load("nowhere.py")
    with pytest.raises(GcjaxError, match="does not exist"):
        configs.load(str(tmp_path))
    with pytest.raises(GcjaxError, match=r"study\.py:plian: there is no preset 'plian'; there are: plain, other"):
        configs.load(f"{study}:plian")
    other = tmp_path / "other.py"
    other.write_text("x = 1\n")
    with pytest.raises(GcjaxError, match=r"other\.py defines no get_config"):
        configs.load(str(other))
    other.write_text("def get_config(:\n")
    with pytest.raises(GcjaxError, match=r"other\.py: "):
        configs.load(str(other))
    other.write_text("def get_config(preset=''):\n    return {}['missing']\n")
    with pytest.raises(KeyError, match="missing"):
        configs.load(str(other))


@pytest.mark.parametrize("preset", ["quick", "paper", "init_scale", "optimizer", "normalization"])
def test_presets_of_the_study_load_and_share_every_field(preset):
    base, config = configs.load(STUDY), configs.load(f"{STUDY}:{preset}")
    paths, others = ({path for path, _ in configs.leaves(c) if not path.startswith("points.")} for c in (base, config))
    assert config.preset == preset
    assert paths == others
    claims = configs.differences(base.claims.to_dict(), config.claims.to_dict())
    assert claims == [], "thresholds stand fixed, whatever the preset"


EVERY = {
    "mlp_ablation": ("quick", "paper", "init_scale", "optimizer", "normalization"),
    "mlp_mechanism": ("factorial", "dose", "symmetry"),
    "mlp_phase": ("small", "full"),
    "llama_wikitext": ("mini", "34m", "ablation", "untested"),
}


@pytest.mark.parametrize(("study", "preset"), [(study, preset) for study, presets in EVERY.items() for preset in presets])
def test_every_preset_can_run_and_an_unknown_one_names_them(study, preset):
    file = Path(STUDY).with_name(f"{study}.py")
    config = configs.load(f"{file}:{preset}")
    assert (config.study, config.preset) == (study, preset)
    assert len(check(config)) == config.seeds * len(config.points) > 0
    with pytest.raises(GcjaxError, match=f"there is no preset 'x'; there are: {', '.join(EVERY[study])}"):
        configs.load(f"{file}:x")
    assert f"configs/{study}.py: {', '.join(EVERY[study])}" in TRAIN_EXAMPLES


def test_an_unknown_preset_of_the_study_is_refused():
    with pytest.raises(GcjaxError, match="there is no preset 'quik'; there are: quick, paper, init_scale, optimizer, norm"):
        configs.load(f"{STUDY}:quik")


def test_presets_do_not_share_state():
    one = configs.load(STUDY).unlock()
    one.claims.spike = 99.0
    one.model.depth = 99
    fresh = configs.load(STUDY)
    assert (fresh.claims.spike, fresh.model.depth) != (99.0, 99)


def test_leaves_reach_into_mappings_and_lists_of_mappings():
    tree = {"a": 1, "b": {"c": (1, 2), "d": {"e": None}}, "points": [{"x": 1}, {"x": {"y": 2}}], "empty": ()}
    expected = {"a": 1, "b.c": (1, 2), "b.d.e": None, "points.0.x": 1, "points.1.x.y": 2, "empty": ()}
    assert dict(configs.leaves(tree)) == expected
    assert dict(configs.leaves(ConfigDict(tree))) == expected
    assert configs.get(ConfigDict(tree), "b.d.e") is None
    assert configs.get(ConfigDict(tree), "a") == 1


def test_to_json_is_the_whole_config(study):
    config = configs.load(study)
    assert json.loads(configs.to_json(config)) == json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a: 1 -> 2"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["a.c: 2 -> 3"]),
        ({"a": 1, "b": 2}, {"b": 2}, ["a: 1 -> (absent)"]),
        ({"b": 2}, {"b": 2, "a": None}, ["a: (absent) -> None"]),
        ({"a": [1, 2]}, {"a": [2, 1]}, ["a: [1, 2] -> [2, 1]"]),
        ({"p": [{"x": 1}]}, {"p": [{"x": 1}, {"x": 2}]}, ["p.1.x: (absent) -> 2"]),
        ({"a": 1, "b": 1}, {"a": 2, "b": 2, "c": 2}, ["a: 1 -> 2", "b: 1 -> 2", "c: (absent) -> 2"]),
    ],
)
def test_differences_name_each_field_once(old, new, lines):
    assert configs.differences(old, new) == lines


def test_differences_of_two_loads_are_the_overrides():
    old, new = (json.loads(configs.to_json(configs.load(STUDY, o))) for o in ([], ["optim.lr=3e-4", "seeds=7"]))
    assert sorted(configs.differences(old, new)) == ["optim.lr: 0.001 -> 0.0003", "seeds: 3 -> 7"]


def test_nearest_suggests_one_name_or_lists_all():
    assert nearest("adm", ["sgd", "adam"]) == "did you mean 'adam'?"
    assert nearest("zzz", ["sgd", "adam"]) == "there are: sgd, adam"
    assert nearest(3, [1, 2]) == "there are: 1, 2"
