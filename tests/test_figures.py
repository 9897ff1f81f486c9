"""Every figure draws without a warning from studies of every shape, is labelled, or skipped where it has no data."""

import io
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from synthetic import Point, at_chance, paper, study

from gcjax.errors import GcjaxError
from gcjax.reporting import doses, figures, panels

GAINS = (0.1, 0.577, 1.0)
OPTIMIZERS = (("adam", 1e-3), ("sgd", 0.1))
DIVERGED = ["diverged"] * 5
STUDIES = {
    "quick": [Point("Res+None", end=0.5), Point("Res+Radial", end=0.4, spiked=2), Point("Res+ReLU")],
    "paper": [
        replace(one, statuses=["diverged", "unfinished"]) if one.variant == "Res+SiLU" else one
        for one in paper()
        if one.variant in {"NoRes+tanh", "NoRes+ReLU", "Res+tanh", "Res+Radial", "Res+SiLU", "Res+LN+ReLU"}
    ],
    "gains": [
        Point(
            variant,
            {"model.init_gain": gain},
            end=end,
            statuses=DIVERGED if (variant, gain) == ("Res+None", 1.0) else (),
        )
        for gain in GAINS
        for variant, end in (("Res+None", 0.5), ("Res+ReLU", 0.95))
    ],
    "optimizers": [
        Point(variant, {"optim.name": name, "optim.lr": rate}, end=end)
        for name, rate in OPTIMIZERS
        for variant, end in (("Res+None", 0.5), ("Res+LN+ReLU", 0.95))
    ],
}
DOSES = {"init_scale", "optimizers"}


@pytest.fixture(scope="module")
def drawn():
    return {name: figures.draw(study(points, seeds=3, layers=5)) for name, points in STUDIES.items()}


@pytest.mark.parametrize("name", STUDIES)
def test_figures_draw_without_warnings_and_are_not_empty(drawn, name):
    for figure in drawn[name][0].values():
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=50)
        assert len(content.getvalue()) > 2000
        assert all(ax.lines or ax.images or ax.texts or ax.collections for ax in figure.axes if ax.get_visible())


@pytest.mark.parametrize(
    ("name", "present"),
    [("quick", set()), ("paper", {"init_scale"}), ("gains", {"init_scale"}), ("optimizers", {"optimizers"})],
)
def test_every_figure_is_drawn_or_skipped_for_a_reason(drawn, name, present):
    done, skipped = drawn[name]
    assert set(done) | set(skipped) == {figure.__name__ for figure in figures.FIGURES}
    assert set(skipped) == DOSES - present
    assert all(skipped.values())


@pytest.mark.parametrize("name", STUDIES)
def test_axes_are_labelled(drawn, name):
    for title, figure in drawn[name][0].items():
        across = [figure.get_supxlabel(), *(ax.get_xlabel() for ax in figure.axes)]
        up = [
            figure.get_supylabel(),
            *(ax.get_ylabel() for ax in figure.axes),
            *(t.get_text() for ax in figure.axes for t in ax.get_yticklabels()),
        ]
        assert any(across), title
        assert any(up), title


def test_a_study_of_gains_has_a_row_a_variant(drawn):
    figure = drawn["gains"][0]["continuity_over_training"]
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[:3] == [f"Res+None\ninit_gain={gain:g}" if gain < 1 else "Res+None (0/3 runs)\ninit_gain=1" for gain in GAINS]
    assert len(titles) == 6


def test_many_settings_run_down_instead_of_across():
    shown = panels.points(study([Point(v, {"data.seedling": i}) for i in range(7) for v in ("Res+None", "Res+ReLU")], seeds=1))
    assert max(row for row, _ in panels.places(shown)) == 6


def test_a_point_says_how_many_of_its_runs_finished(drawn):
    titles = [ax.get_title(loc="left") for ax in drawn["paper"][0]["rank_profile"].axes]
    assert "Res+SiLU (1/3 runs)\ninit_gain=0.1" in titles


def test_a_variant_has_one_colour_everywhere(drawn):
    for study_name, label, expected in (("quick", "Res+ReLU", "#0072b2"), ("quick", "Res+Radial", "#e69f00")):
        for name in ("continuity_over_training", "rank_profile", "lags"):
            figure = drawn[study_name][0][name]
            (ax,) = [ax for ax in figure.axes if ax.get_title(loc="left") == label]
            assert expected in {to_hex(line.get_color()) for line in ax.lines}
    assert panels.colour("Res+LN+ReLU") == panels.colour("Res+ReLU")
    assert panels.dash("Res+LN+ReLU") != panels.dash("Res+ReLU")
    assert panels.colour("Gate") == panels.OTHER_COLOUR


def _legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_spikes_divergence_and_the_positive_baseline_are_marked_where_they_occur(drawn):
    entries = {name: _legend(drawn[name][0]["continuity_over_training"]) for name in STUDIES}
    assert "loss spike" in entries["quick"]
    assert "diverged" not in entries["quick"]
    assert {"loss spike", "diverged", figures.BASELINE} <= set(entries["paper"])
    (positive,) = [ax for ax in drawn["paper"][0]["continuity_over_training"].axes if "NoRes+ReLU" in ax.get_title(loc="left")]
    assert any(np.allclose(line.get_ydata(), 1 / np.pi) for line in positive.lines)


def test_a_dose_without_finished_runs_is_crossed(drawn):
    assert "no finished run" in _legend(drawn["gains"][0]["init_scale"])
    assert "no finished run" not in _legend(drawn["optimizers"][0]["optimizers"])


def test_heat_map_has_the_input_space_above_the_diagonal(drawn):
    (ax,) = [ax for ax in drawn["quick"][0]["layer_cosines"].axes if ax.get_title(loc="left") == "Res+ReLU"]
    values = ax.images[0].get_array()
    assert values[0, 1] == pytest.approx(0.96, abs=0.02)
    assert values[1, 0] == pytest.approx(0.5, abs=0.05)


def test_figures_without_data_are_skipped():
    lone = study([at_chance("NoRes+tanh")], layers=2, ranks=1)
    _, skipped = figures.draw(lone)
    assert "three layers" in skipped["lags"]
    assert "leading" in skipped["rank_profile"]
    nothing = study([Point("Res+ReLU", statuses=DIVERGED)])
    done, skipped = figures.draw(nothing)
    assert set(done) == {"continuity_over_training"}
    assert skipped["transfer"] == "no run has finished"
    with pytest.raises(GcjaxError, match="one initial scale"):
        doses.init_scale(nothing.isel(matrix=0))


def test_a_study_of_several_matrices_has_a_set_of_figures_each():
    done, _ = figures.draw(study([Point("Res+ReLU")], seeds=2, matrices=("gate", "up")))
    assert {"lags-gate", "lags-up"} <= set(done)
