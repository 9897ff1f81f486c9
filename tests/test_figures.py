"""Every figure draws without a warning from studies of every shape, is labelled, or skipped where it has no data."""

import io
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from synthetic import PROJECTIONS, TRANSFORMER_CLAIMS, Point, ablated, at_chance, paper, study, transformer

from gcjax.errors import GcjaxError
from gcjax.reporting import doses, figures, panels, trained

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
DOSES = {"init_scale", "optimizers", "onset", "phase_maps", "dose_response", "predictors", "what_is_lost"}


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
    [("quick", set()), ("paper", {"init_scale"}), ("gains", {"init_scale", "onset"}), ("optimizers", {"optimizers"})],
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


def test_several_matrices_have_shared_figures_and_a_set_each():
    done, skipped = figures.draw(study([Point("Res+ReLU")], seeds=2, layers=3, matrices=("gate", "down")))
    shared = {figure.__name__ for figure in trained.FIGURES} - {"perplexity"}
    each = {f"{name}-{matrix}" for name in ("rank_profile", "layer_cosines", "lags", "transfer") for matrix in ("gate", "down")}
    assert set(done) == shared | each
    assert set(skipped) == {"perplexity", *figures.TOGETHER} | {f"{n}-{m}" for n in DOSES for m in ("gate", "down")}
    assert all(skipped.values())
    assert done["transfer-gate"].get_supylabel().startswith("transfer |⟨v₁(W)")
    assert done["transfer-down"].get_supylabel().startswith("transfer |⟨u₁(W)")


def test_figures_that_name_a_space_are_of_the_matrix_s_own():
    points = [Point("Res+ReLU", {"model.init_gain": gain}, space="output", output=0.1) for gain in GAINS]
    ds = study(points, seeds=2, layers=3, matrices=("down", "gate"))
    for matrix, label, level in (("down", "continuity u1, output space", 0.96), ("gate", "continuity v1, input space", 0.1)):
        for draw in (doses.init_scale, figures.continuity_over_training):
            figure = draw(ds.sel(matrix=matrix))
            assert figure.get_supylabel() == label
            mean = figure.axes[0].lines[-1 if draw is doses.init_scale else 2].get_ydata()
            assert float(np.asarray(mean)[-1]) == pytest.approx(level, abs=0.03)


SILU, NONE = transformer("SiLU"), ablated()
TRANSFORMERS = {
    "two": [SILU, NONE],
    "three": [SILU, NONE, replace(transformer("V ReLU"), statuses=["diverged"])],
    "many": [SILU, NONE, transformer("no RoPE"), replace(transformer("NoRes"), statuses=DIVERGED)],
    "rates": [replace(one, swept={"optim.lr": rate}) for rate in (1e-3, 3e-3) for one in (SILU, NONE)],
}


@pytest.fixture(scope="module")
def together():
    made = {
        name: study(points, seeds=3, layers=4, matrices=PROJECTIONS, claims=TRANSFORMER_CLAIMS, language=True)
        for name, points in TRANSFORMERS.items()
    }
    return {name: {figure.__name__: figure(ds) for figure in trained.FIGURES} for name, ds in made.items()}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_figures_of_transformers_draw_without_warnings_and_are_labelled(together, name):
    for title, figure in together[name].items():
        figure.savefig(io.BytesIO(), format="png", dpi=50)
        shown = [ax for ax in figure.axes if ax.get_visible()]
        rows = [text.get_text() for ax in shown for text in ax.get_yticklabels()]
        assert any([figure.get_supylabel(), *(ax.get_ylabel() for ax in shown)]) or "Q v₁   SiLU" in rows[0], title
        assert figure.get_supxlabel() or any(ax.get_xlabel() or ax.get_xticklabels() for ax in shown), title
        assert figure.legends, title


def _curves(ax):
    """Colour and dash of every line, with its last value."""
    return {(to_hex(one.get_color()), one.get_linestyle()): float(one.get_ydata()[-1]) for one in ax.lines}


def test_projections_over_training_has_each_space_in_its_colour(together):
    panels_of = {ax.get_title(loc="left"): ax for ax in together["two"]["projections_over_training"].axes}
    assert list(panels_of)[:7] == ["Q", "K", "V", "O", "Gate", "Up", "Down"]
    blue, orange = "#0072b2", "#e69f00"
    assert panels_of["V"].get_title(loc="right") == "paper: neither"
    assert _curves(panels_of["Q"])[blue, "-"] == pytest.approx(0.8, abs=0.02)
    assert _curves(panels_of["Q"])[orange, "-"] < 0.1
    assert _curves(panels_of["Down"])[orange, "-"] == pytest.approx(0.8, abs=0.02)
    assert _curves(panels_of["Down"])[blue, "-"] < 0.1
    assert _curves(panels_of["Gate"])[blue, "--"] == pytest.approx(0.4, abs=0.02)


def test_projections_at_the_end_are_bars_of_both_spaces(together):
    (ax,) = together["two"]["projections_end"].axes
    heights = [bar.get_height() for bar in ax.patches]
    silu, none = np.array(heights).reshape(2, 7, 2)
    np.testing.assert_allclose(silu[:, 0], [0.8, 0.8, 0.05, 0.05, 0.8, 0.8, 0.05], atol=0.03)
    np.testing.assert_allclose(silu[:, 1], [0.05, 0.05, 0.05, 0.8, 0.05, 0.05, 0.8], atol=0.03)
    np.testing.assert_allclose(none[:, 0], [0.8, 0.8, 0.05, 0.05, 0.4, 0.4, 0.05], atol=0.03)


def test_gradients_are_of_each_matrix_s_own_space(together):
    figure = together["two"]["gradients"]
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.get_visible()]
    assert titles == ["Q, v₁", "K, v₁", "V, v₁", "O, u₁", "Gate, v₁", "Up, v₁", "Down, u₁"]
    for ax in figure.axes[:7]:
        gradient = [value for (_, dash), value in _curves(ax).items() if dash == "--"]
        assert gradient == pytest.approx([0.95, 0.95], abs=0.03)


def test_perplexity_is_logarithmic_and_named_in_the_legend(together):
    figure = together["two"]["perplexity"]
    (ax,) = figure.axes
    assert ax.get_yscale() == "log"
    assert [text.split(":")[0] for text in _legend(figure)] == ["SiLU", "None"]
    assert ax.lines[0].get_ydata()[0] == pytest.approx(4096, rel=0.01)


def test_more_variants_have_a_row_each_and_say_what_did_not_finish(together):
    axes = together["many"]["projections_over_training"].axes
    assert len(axes) == 4 * 7
    assert [ax.get_ylabel() for ax in axes[::7]] == ["SiLU", "None", "no RoPE", "NoRes (0/3 runs)"]
    assert [text.get_text() for text in axes[21].texts] == ["no finished run"]
    rows = [ax.get_title(loc="left") for ax in together["rates"]["projections_end"].axes]
    assert rows == ["SiLU, lr=0.001", "None, lr=0.001", "SiLU, lr=0.003", "None, lr=0.003"]


def test_a_palette_tells_variants_apart():
    names = ("SiLU", "linear attention", "no RoPE", "V ReLU", "V SiLU", "None")
    tints = panels.palette(names)
    assert len(set(tints.values())) == len(names)
    assert (tints["SiLU"], tints["None"]) == (panels.COLOURS["SiLU"], panels.COLOURS["None"])


def test_transformers_without_finished_runs_have_no_figures():
    ds = study([replace(SILU, statuses=DIVERGED)], seeds=2, matrices=PROJECTIONS, claims=TRANSFORMER_CLAIMS, language=True)
    done, skipped = figures.draw(ds)
    assert done == {}
    assert skipped["projections_end"] == "no run has finished"
