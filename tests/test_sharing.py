"""Shared bases: prescribed structure is found, errors are those of the factors, and of an independent SVD."""

import numpy as np
import pytest

from gcjax.errors import GcjaxError
from gcjax.geometry import sharing
from gcjax.geometry.sharing import CHOICES

SHAPES = [(2, 12, 7), (3, 7, 12), (4, 9, 9)]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def roots(n: int, i: int, seed: int = 1) -> np.ndarray:
    """Of anisotropic moments, another for each layer."""
    x = draw(n, 3 * i, i, seed=seed) * np.geomspace(1, 30, i)
    return np.stack([sharing.root(one.T @ one, 1e-9) for one in x])


def squared(w: np.ndarray, approximated: np.ndarray, root: np.ndarray | None) -> float:
    rest = w - approximated
    return float(np.sum((rest if root is None else rest @ root) ** 2))


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_errors_are_those_of_the_singular_value_decomposition(shape: tuple[int, int, int]) -> None:
    w = draw(*shape)
    stacked = {"input": np.concatenate(w), "output": np.concatenate(w, axis=1)}
    expected = {name: np.linalg.svd(x, compute_uv=False) ** 2 for name, x in stacked.items()}
    expected["own"] = np.sum([np.linalg.svd(x, compute_uv=False) ** 2 for x in w], axis=0)
    found = sharing.errors(w)
    for choice in CHOICES:
        tails = [expected[choice][r:].sum() for r in range(len(expected[choice]) + 1)]
        np.testing.assert_allclose(found[choice], tails, rtol=1e-9, atol=1e-10)
        assert len(tails) == sharing.highest_rank(shape, choice) + 1


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("choice", CHOICES)
def test_errors_are_those_of_the_factors(choice: str, shape: tuple[int, int, int], weighted: bool) -> None:
    w, root = draw(*shape), roots(shape[0], shape[2]) if weighted else None
    curve = sharing.errors(w, root)[choice]
    assert (np.diff(curve) <= 1e-9 * curve[0]).all()
    ranks = (1, 3, sharing.highest_rank(shape, choice))
    for rank, made in zip(ranks, sharing.factors(w, choice, ranks, root)):
        assert squared(w, made.dense(), root) == pytest.approx(curve[rank], rel=1e-7, abs=1e-9 * curve[0])
        assert made.parameters == rank * sharing.parameters_per_rank(shape, choice)
    assert curve[-1] == 0


@pytest.mark.parametrize("choice", CHOICES)
def test_no_other_factors_are_better(choice: str) -> None:
    """With one moment for all layers, where the weighted basis is the best there is: steps away only cost."""
    w, root = draw(3, 8, 6), np.repeat(roots(1, 6), 3, axis=0)
    (best,) = sharing.factors(w, choice, [2], root)
    least = squared(w, best.dense(), root)
    for seed in range(20):
        left = best.left + 0.01 * draw(*best.left.shape, seed=seed)
        right = best.right + 0.01 * np.abs(best.right).mean() * draw(*best.right.shape, seed=100 + seed)
        assert squared(w, left @ right, root) > least


def test_the_identity_as_weight_changes_nothing() -> None:
    w, identity = draw(3, 8, 6), np.repeat(np.eye(6)[None], 3, axis=0)
    plain, weighted = sharing.errors(w), sharing.errors(w, identity)
    for choice in CHOICES:
        np.testing.assert_allclose(weighted[choice], plain[choice], rtol=1e-9, atol=1e-10)


def test_a_weight_turns_the_choice_of_directions() -> None:
    """Inputs that never occur cost nothing: all else is kept exactly at their complement's rank."""
    w = draw(2, 9, 6)
    moment = np.diag([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    root = np.repeat(sharing.root(moment, 1e-12)[None], 2, axis=0)
    for choice in CHOICES:
        curve = sharing.errors(w, root)[choice]
        directions = {"own": 2, "input": 2, "output": 4}[choice]
        assert curve[directions] < 1e-9 * curve[0] < curve[directions - 1]


@pytest.mark.parametrize("shared", ["input", "output"])
def test_planted_structure_prefers_its_space(shared: str) -> None:
    basis, own = draw(3, 16, seed=2), draw(4, 20, 3, seed=3)
    w = own @ basis if shared == "input" else np.swapaxes(own @ basis, 1, 2)
    w = w + 0.01 * draw(*w.shape, seed=4)
    ratio = 0.3
    rank = sharing.ranks(w.shape, ratio)
    error = {choice: sharing.at(curve, rank[choice]) for choice, curve in sharing.errors(w).items()}
    assert min(error, key=lambda choice: error[choice]) == shared
    other = "output" if shared == "input" else "input"
    assert error[shared] < 0.01 * error[other]


@pytest.mark.parametrize("choice", ["input", "output"])
def test_identical_layers_need_half_the_parameters(choice: str) -> None:
    """Of rank d / 3, that is: every layer has coefficients of its own, so more could not be stored in half."""
    w = np.repeat(draw(1, 24, 8, seed=1) @ draw(1, 8, 24, seed=2), 2, axis=0)
    curves, rank = sharing.errors(w), sharing.ranks(w.shape, 0.5)
    assert sharing.at(curves[choice], rank[choice]) < 1e-12 * (w**2).sum()
    assert sharing.at(curves["own"], rank["own"]) > 1e-3 * (w**2).sum()
    (made,) = sharing.factors(w, choice, [int(rank[choice])])
    np.testing.assert_allclose(made.dense(), w, atol=1e-12 * np.abs(w).max() * 24)
    assert 2 * made.parameters == w.size


def test_ranks_cost_the_same() -> None:
    shape = (3, 20, 50)
    found = sharing.ranks(shape, 0.2)
    for choice in CHOICES:
        assert found[choice] * sharing.parameters_per_rank(shape, choice) == pytest.approx(0.2 * 3 * 20 * 50)


def test_random_frames_keep_the_spectra_and_nothing_else() -> None:
    s = np.sort(np.abs(draw(2, 30)))[:, ::-1]
    w = sharing.random_frames(s, (30, 40), seed=5)
    np.testing.assert_allclose(sharing.singular_values(w), s, rtol=1e-8)
    v = np.stack([np.linalg.svd(x)[2][0] for x in w])
    assert abs(v[0] @ v[1]) < 0.5
    assert not np.allclose(w, sharing.random_frames(s, (30, 40), seed=6))
    np.testing.assert_array_equal(w, sharing.random_frames(s, (30, 40), seed=5))


def test_a_layer_by_itself_shares_with_none() -> None:
    """The three choices are one where there is nothing to share."""
    w, root = draw(1, 9, 6), roots(1, 6)
    for weight in (None, root):
        curves = sharing.errors(w, weight)
        np.testing.assert_allclose(curves["input"], curves["own"], rtol=1e-8, atol=1e-9 * curves["own"][0])
        np.testing.assert_allclose(curves["output"], curves["own"], rtol=1e-8, atol=1e-9 * curves["own"][0])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: sharing.ranks((2, 4, 4), 1.0), r"ratio 1 is outside \(0, 1\)"),
        (lambda: sharing.ranks((2, 4, 4), 0.0), r"ratio 0 is outside"),
        (lambda: sharing.factors(draw(2, 4, 4), "own", [2, 5]), r"rank 5 is outside 1\.\.4"),
        (lambda: sharing.parameters_per_rank((2, 4, 4), "inpt"), "there is no choice 'inpt'; .*input"),
    ],
)
def test_bad_input_is_named(call, match: str) -> None:
    with pytest.raises(GcjaxError, match=match):
        call()
