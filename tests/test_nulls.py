"""Chance levels against Monte Carlo; every tolerance is four standard errors of the simulation, or stated."""

import numpy as np
import pytest
from matrices import frame, matrix
from scipy import stats

from gcjax.geometry import nulls
from gcjax.geometry.continuity import measure_jit

FLAT, STEEP, ONE = np.ones(8), 0.5 ** np.arange(8), np.array([1.0])
RANDOM = np.linalg.svd(np.random.default_rng(0).standard_normal((8, 8)))[1]


def _units(rng, *shape):
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _cosines(d, draws=40_000):
    rng = np.random.default_rng(d)
    return np.abs(np.sum(_units(rng, draws, d) * _units(rng, draws, d), axis=-1))


def _covers(quantiles, q, values, draws=None):
    """Whether the share of `values` below each quantile is its q, give or take four standard errors.

    `draws`: of the simulation that the quantiles come from, which has an error of its own.
    """
    q = np.array(q)
    below = (values[:, None] <= quantiles).mean(axis=0)
    return (np.abs(below - q) < 4 * np.sqrt(q * (1 - q) * (1 / len(values) + (1 / draws if draws else 0)))).all()


@pytest.mark.parametrize(("d", "mean"), [(1, 1), (2, 2 / np.pi), (3, 1 / 2), (4, 4 / (3 * np.pi))])
def test_mean_cosine_in_few_dimensions_is_known_exactly(d, mean):
    assert nulls.cosine_mean(d) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("d", [2, 5, 16, 256])
def test_mean_cosine(d):
    cosines = _cosines(d)
    assert nulls.cosine_mean(d) == pytest.approx(cosines.mean(), abs=4 * cosines.std() / np.sqrt(len(cosines)))


def test_mean_cosine_of_wide_networks_is_the_paper_s_and_never_overflows():
    assert nulls.cosine_mean(256) == pytest.approx(0.05, abs=1e-3)
    assert nulls.cosine_mean(10**6) == pytest.approx(np.sqrt(2 / (np.pi * 10**6)), rel=1e-5)


@pytest.mark.parametrize("d", [2, 5, 16, 256])
def test_cosine_quantiles(d):
    q, cosines = (0.025, 0.25, 0.5, 0.75, 0.975), _cosines(d)
    assert _covers(nulls.cosine_quantile(q, d), q, cosines)


def test_cosine_quantiles_run_from_nothing_to_one():
    np.testing.assert_allclose(nulls.cosine_quantile([0, 1], 7), [0, 1])


@pytest.mark.parametrize(("d", "pairs"), [(8, 1), (8, 3), (64, 15)])
def test_quantiles_of_the_mean_over_pairs_that_share_their_layers(d, pairs):
    """The pairs of a chain of layers are not drawn apart here: each vector meets both its neighbours."""
    q, chains = (0.025, 0.5, 0.975), 8000
    x = _units(np.random.default_rng(1), chains, pairs + 1, d)
    means = np.abs(np.sum(x[:, :-1] * x[:, 1:], axis=-1)).mean(axis=1)
    quantiles = nulls.cosine_mean_quantile(q, d, pairs)
    assert _covers(quantiles, q, means, draws=20_000)
    np.testing.assert_array_equal(quantiles, nulls.cosine_mean_quantile(q, d, pairs))


def test_the_mean_over_one_pair_is_one_pair():
    q = [0.1, 0.5, 0.9]
    np.testing.assert_allclose(nulls.cosine_mean_quantile(q, 16, 1), nulls.cosine_quantile(q, 16), rtol=0.03)


def test_overlap():
    d, draws, rng = 9, 2000, np.random.default_rng(2)
    k = np.arange(1, d + 1)
    overlaps = np.empty((draws, d))
    for i in range(draws):
        square = frame(rng, d) ** 2  # of one frame seen from the other
        overlaps[i] = [square[:j, :j].sum() / j for j in k]
    error = overlaps.std(axis=0) / np.sqrt(draws)
    assert (np.abs(nulls.overlap_mean(k, d) - overlaps.mean(axis=0)) <= 4 * error + 1e-12).all()


def _traceless(spectrum, d):
    eigen = np.zeros(d)
    eigen[: len(spectrum)] = np.asarray(spectrum) ** 2
    eigen -= eigen.mean()
    return eigen / np.linalg.norm(eigen)


def _gram_alignments(one, other, d, draws=4000, seed=3):
    """Of Haar frames, in float64, by the definition: the inner product of the two rotated traceless matrices."""
    rng, a, b = np.random.default_rng(seed), np.diag(_traceless(one, d)), np.diag(_traceless(other, d))
    return np.array([np.sum(a * (q @ b @ q.T)) for q in (frame(rng, d) for _ in range(draws))])


@pytest.mark.parametrize(
    ("one", "other", "d"),
    [
        (RANDOM, RANDOM, 8),
        (RANDOM, STEEP, 8),
        (ONE, RANDOM, 8),
        (FLAT[:4], STEEP[:2], 8),
        (ONE, ONE, 3),  # few dimensions, where one more or less shows
        (RANDOM[:3], STEEP[:2], 3),
        (STEEP[:2], STEEP[:2], 2),
    ],
)
def test_gram_alignment_has_this_mean_and_spread_whatever_the_spectra(one, other, d):
    alignments = _gram_alignments(one, other, d)
    std, n = nulls.gram_alignment_std(d), len(alignments)
    assert abs(alignments.mean()) < 4 * std / np.sqrt(n)
    # The error of a standard deviation, from the fourth moment of what was drawn.
    error = np.sqrt((np.mean(alignments**4) / std**4 - 1) / n) / 2
    assert alignments.std() == pytest.approx(std, rel=4 * error)


def test_haar_squares_are_those_of_haar_matrices():
    d, draws = 6, 4000
    squares = nulls.haar_squares(d, draws)
    assert squares.shape == (draws, d, d)
    np.testing.assert_allclose(squares.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(squares.sum(axis=2), 1, atol=1e-5)
    # One entry squared is Beta(1/2, (d-1)/2); two of a row repel each other.
    for entry in ((0, 0), (2, 4), (d - 1, d - 1)):
        assert stats.kstest(squares[:, *entry], stats.beta(0.5, (d - 1) / 2).cdf).pvalue > 1e-3
    together = np.mean(squares[:, 0, 0] * squares[:, 0, 1], dtype=np.float64)
    assert together == pytest.approx(1 / (d * (d + 2)), rel=0.1)
    np.testing.assert_array_equal(squares, nulls.haar_squares(d, draws))
    assert (squares[:10] != nulls.haar_squares(d, 10, seed=1)).any()


@pytest.mark.parametrize("spectra", [(RANDOM, STEEP), (ONE, STEEP), (STEEP, FLAT[:3], RANDOM, ONE)])
def test_gram_alignment_quantiles_of_the_mean_over_pairs(spectra):
    q, d, chains, rng = (0.025, 0.5, 0.975), 8, 3000, np.random.default_rng(4)
    spectrum_LM = np.array([np.pad(s, (0, d - len(s))) for s in spectra])
    draws = 3000
    quantiles = nulls.gram_alignment_quantile(q, spectrum_LM, nulls.haar_squares(d, draws))
    eigen_LD = [_traceless(s, d) for s in spectra]
    means = np.empty(chains)
    for i in range(chains):
        grams = [(frames := frame(rng, d)) * eigen @ frames.T for eigen in eigen_LD]
        means[i] = np.mean([np.sum(a * b) for a, b in zip(grams, grams[1:])])
    assert _covers(quantiles, q, means, draws)


def test_gram_alignment_quantiles_know_the_larger_space_of_rectangular_matrices():
    """The output space of a 6 x 3 matrix: three singular values, three directions that it does not reach."""
    rng, q = np.random.default_rng(5), [0.1, 0.9]
    spectrum = np.array([2.0, 1.0, 0.5])
    w_LOI = np.stack([matrix(rng, 6, 3, spectrum) for _ in range(400)]).astype(np.float32)
    alignments = np.asarray(measure_jit(w_LOI, rank=1, solver="svd").gram_alignment_AP)
    for space, d in ((0, 3), (1, 6)):
        low, high = nulls.gram_alignment_quantile(q, np.stack([spectrum] * 2), nulls.haar_squares(d, 3000))
        inside = np.mean((alignments[space] > low) & (alignments[space] < high))
        assert inside == pytest.approx(0.8, abs=4 * np.sqrt(0.8 * 0.2 / 399))


@pytest.mark.parametrize("shape", [(8, 60), (4, 30)])
def test_gram_alignment_quantiles_are_nearly_normal_in_many_dimensions(shape):
    layers, values = shape
    spectrum_LM = np.linspace(2, 1, values) ** np.arange(1, layers + 1)[:, None]
    q, d = [0.025, 0.16, 0.5, 0.84, 0.975], 60
    drawn = nulls.gram_alignment_quantile(q, spectrum_LM, nulls.haar_squares(d, 4000))
    normal = nulls.gram_alignment_quantile(q, spectrum_LM, d)
    np.testing.assert_allclose(drawn, normal, atol=0.15 * normal[-1])
    assert np.isnan(nulls.gram_alignment_quantile(q, spectrum_LM * 0, d)).all()


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows", [60, 200])
def test_gram_alignment_of_gains_is_that_of_haar_frames(spread, rows):
    rng, d, draws = np.random.default_rng(7), 120, 150
    gain_LD = np.exp(spread * rng.standard_normal(d) + 0.3 * spread * rng.standard_normal((3, d)))
    spectrum_LM = np.stack([0.9 ** np.arange(min(rows, d)), np.linspace(2, 1, min(rows, d)), 0.7 ** np.arange(min(rows, d))])
    found = nulls.gram_alignment_of_gains(gain_LD, (spectrum_LM**2).sum(axis=1), (spectrum_LM**4).sum(axis=1))
    drawn = np.zeros((draws, 3, d, d))
    for one in drawn:
        for layer in range(3):
            frame = np.linalg.qr(rng.standard_normal((d, d)))[0][:, : spectrum_LM.shape[1]] * spectrum_LM[layer]
            one[layer] = (frame @ frame.T) * np.outer(gain_LD[layer], gain_LD[layer])
    drawn -= np.trace(drawn, axis1=-2, axis2=-1)[..., None, None] / d * np.eye(d)
    norms = np.linalg.norm(drawn, axis=(-2, -1))
    alignment_NP = np.sum(drawn[:, 1:] * drawn[:, :-1], axis=(-2, -1)) / (norms[:, 1:] * norms[:, :-1])
    error_P = alignment_NP.std(axis=0) / np.sqrt(draws)
    np.testing.assert_array_less(np.abs(found - alignment_NP.mean(axis=0)), 4 * error_P + 0.015)
    assert (found > 0.01).all() if spread else (np.abs(found) < 1e-12).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_gram_alignment_quantiles_of_a_lost_layer_are_nan(bad):
    spectrum_LM = np.ones((3, 4)) * [4, 3, 2, 1]
    squares = nulls.haar_squares(4, 20)
    assert np.isfinite(nulls.gram_alignment_quantile([0.1, 0.9], spectrum_LM, squares)).all()
    spectrum_LM[1] = bad
    quantiles = nulls.gram_alignment_quantile([0.1, 0.9], spectrum_LM, squares)
    assert quantiles.shape == (2,)
    assert np.isnan(quantiles).all()


def test_gram_alignment_quantiles_do_not_depend_on_scale():
    spectrum_LM = np.stack([RANDOM, STEEP])
    squares = nulls.haar_squares(8, 100)
    plain = nulls.gram_alignment_quantile([0.1, 0.9], spectrum_LM, squares)
    np.testing.assert_allclose(nulls.gram_alignment_quantile([0.1, 0.9], spectrum_LM * 1e-25, squares), plain, rtol=1e-4)


@pytest.mark.parametrize("shape", [(12, 12), (20, 12)])
def test_what_is_measured_on_random_matrices_falls_inside_its_null(shape):
    """End to end: each space's measures against the null of that space's dimension, and not of the other's."""
    w_LOI = np.random.default_rng(6).standard_normal((400, *shape)).astype(np.float32)
    found, n = measure_jit(w_LOI, rank=4, solver="svd"), 399
    for space, d in ((0, shape[1]), (1, shape[0])):
        cosines = np.asarray(found.cosine_APK[space])
        spread = np.sqrt(1 / d - nulls.cosine_mean(d) ** 2)
        assert (np.abs(cosines.mean(axis=0) - nulls.cosine_mean(d)) < 4 * spread / np.sqrt(n)).all()
        low, high = nulls.cosine_quantile([0.025, 0.975], d)
        inside = np.mean((cosines[:, 0] > low) & (cosines[:, 0] < high))
        assert inside == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / n))
        overlaps = np.asarray(found.overlap_APK[space]).mean(axis=0)
        np.testing.assert_allclose(overlaps, nulls.overlap_mean(np.arange(1, 5), d), rtol=0.2)
        alignments = np.asarray(found.gram_alignment_AP[space])
        assert abs(alignments.mean()) < 4 * nulls.gram_alignment_std(d) / np.sqrt(n)
        assert alignments.std() == pytest.approx(nulls.gram_alignment_std(d), rel=0.15)
