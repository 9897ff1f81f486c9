"""Block Krylov, frames, sketches and the choice between methods, against float64 SVD."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import frame, matrix, sine

from gcjax.geometry import krylov, nulls, sketch
from gcjax.geometry.continuity import gram_alignment, sigma2_alignment
from gcjax.geometry.decompose import alignments, decompose, framed, gram64, null_leading
from gcjax.geometry.krylov import Wanted

SHAPES = ((200, 300), (300, 200), (176, 176))
TOLERANCE = 1e-4


def _spectrum(k, gap=0.1):
    """Four values that stand apart by `gap`, then a long flat tail, as in language models."""
    return np.concatenate([(1 + gap) ** np.arange(4, 0, -1), 0.5 * np.arange(1, k - 3) ** -0.2])


def _gains(d, seed=0):
    return np.exp(0.5 * np.random.default_rng(seed).standard_normal(d)).astype(np.float32)


def _leading(w_OI, rank=4, tolerance=TOLERANCE, **more):
    return krylov.leading_triplets(jnp.asarray(w_OI, jnp.float32), [Wanted(None, rank, tolerance, 0)], **more)[0]


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**31), gap=st.floats(0.02, 0.3))
def test_leading_vectors_are_those_of_float64(shape, seed, gap):
    w_OI = matrix(np.random.default_rng(seed), *shape, _spectrum(min(shape), gap)).astype(np.float32)
    u_OK, s_K, vt_KI = np.linalg.svd(w_OI.astype(np.float64), full_matrices=False)
    found = _leading(w_OI)
    assert found.converged
    assert sine(found.v_IK, vt_KI[:4].T).max() < 2 * TOLERANCE
    assert sine(found.u_OK, u_OK[:, :4]).max() < 2 * TOLERANCE
    np.testing.assert_allclose(found.s_K, s_K[:4], rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_residuals_are_the_true_ones_and_bound_the_vectors(shape):
    w_OI = matrix(np.random.default_rng(1), *shape, _spectrum(min(shape))).astype(np.float32)
    found, w = _leading(w_OI, tolerance=1e-2), w_OI.astype(np.float64)
    right = np.linalg.norm(w @ found.v_IK - found.u_OK * found.s_K, axis=0)
    left = np.linalg.norm(w.T @ found.u_OK - found.v_IK * found.s_K, axis=0)
    np.testing.assert_allclose(found.residual_K, np.hypot(right, left), atol=3e-6)
    assert found.passes < _leading(w_OI, tolerance=1e-6).passes


def test_a_near_tie_mixes_its_two_vectors_and_no_others():
    spectrum = _spectrum(200)
    spectrum[1] = spectrum[0] / 1.0005
    w_OI = matrix(np.random.default_rng(2), 300, 200, spectrum).astype(np.float32)
    vt_KI = np.linalg.svd(w_OI.astype(np.float64))[2]
    found = _leading(w_OI)
    assert found.converged
    assert sine(found.v_IK[:, 2:], vt_KI[2:4].T).max() < 2 * TOLERANCE
    outside = found.v_IK[:, :2] - vt_KI[:2].T @ (vt_KI[:2] @ found.v_IK[:, :2])
    assert np.linalg.norm(outside, axis=0).max() < 2 * TOLERANCE


@pytest.mark.parametrize("rank", [1, 3, 40])
def test_a_matrix_of_low_rank_leaves_no_nan_and_orthonormal_vectors(rank):
    w_OI = matrix(np.random.default_rng(3), 200, 300, 0.8 ** np.arange(rank)).astype(np.float32)
    found = _leading(w_OI, rank=8)
    assert found.converged
    for x in (found.u_OK, found.v_IK):
        np.testing.assert_allclose(x.T @ x, np.eye(8), atol=1e-5)
    np.testing.assert_allclose(found.s_K, np.pad(0.8 ** np.arange(min(rank, 8)), (0, max(0, 8 - rank))), atol=1e-5)


def test_a_scale_changes_the_singular_values_alone():
    w_OI = matrix(np.random.default_rng(4), 200, 300, _spectrum(200)).astype(np.float32)
    one, other = _leading(w_OI), _leading(w_OI * np.float32(2**20))
    np.testing.assert_array_equal(one.v_IK, other.v_IK)
    np.testing.assert_array_equal(one.s_K * np.float32(2**20), other.s_K)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_frames_that_share_their_passes_are_as_alone(shape):
    w_OI = jnp.asarray(matrix(np.random.default_rng(12), *shape, _spectrum(min(shape))), jnp.float32)
    gain_O, gain_I = (jnp.asarray(_gains(d)) for d in shape)
    wanted = [
        Wanted(None, 8, TOLERANCE, 0),
        Wanted(krylov.gains(gain_I, False), 4, 1e-2, 1),
        Wanted(krylov.random_frame(jax.random.key(3), gain_O, True), 1, 1e-2, 2, 4),
    ]
    together = krylov.leading_triplets(w_OI, wanted)
    assert len({one.passes for one in together}) > 1
    for one, request in zip(together, wanted):
        (alone,) = krylov.leading_triplets(w_OI, [request])
        assert one.passes == alone.passes
        np.testing.assert_allclose(one.s_K, alone.s_K, rtol=1e-5)
        assert sine(one.v_IK[:, 0], alone.v_IK[:, 0]) < 1e-4
        assert sine(one.u_OK[:, 0], alone.u_OK[:, 0]) < 1e-4


def test_every_step_of_a_shape_is_one_program():
    programs = (krylov._product, krylov._transposed, krylov._add_left, krylov._add_right)
    _leading(np.random.default_rng(0).standard_normal((210, 290)))
    compiled = [program._cache_size() for program in programs]
    _leading(np.random.default_rng(1).standard_normal((210, 290)))
    assert [program._cache_size() for program in programs] == compiled


def test_what_does_not_converge_is_decomposed_whole(monkeypatch):
    w_OI = jnp.asarray(matrix(np.random.default_rng(5), 200, 300, 1 + 1e-5 * np.arange(200)[::-1]), jnp.float32)
    stuck = _leading(w_OI, tolerance=1e-7, restarts=0)
    assert not stuck.converged
    monkeypatch.setattr(krylov, "leading_triplets", lambda *args: [stuck])
    (found,) = decompose(w_OI, [None], 4, 0, TOLERANCE, 100)
    assert (found.method, found.whole, found.s_K.shape) == ("krylov+gram64", True, (200,))


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_frame_is_the_same_written_out_and_applied(shape, output):
    w_OI = jnp.asarray(matrix(np.random.default_rng(6), *shape, _spectrum(min(shape))), jnp.float32)
    gain_D = jnp.asarray(_gains(shape[0] if output else shape[1]))
    for made in (krylov.gains(gain_D, output), krylov.random_frame(jax.random.key(2), gain_D, output)):
        a_OI = framed(w_OI, made)
        x_I2, y_O2 = (
            np.random.default_rng(7).standard_normal((2, shape[1], 2)),
            np.random.default_rng(8).standard_normal((shape[0], 2)),
        )
        (y,) = krylov.forward(w_OI, [made], [jnp.asarray(x_I2[0], jnp.float32)])
        np.testing.assert_allclose(y, a_OI @ x_I2[0], atol=1e-4)
        (x,) = krylov.backward(w_OI, [made], [jnp.asarray(y_O2, jnp.float32)])
        np.testing.assert_allclose(x, a_OI.T @ y_O2, atol=1e-4)
        ((whole,), (part,)) = (decompose(w_OI, [made], 4, 0, TOLERANCE, below) for below in (10**6, 0))
        assert (whole.method, part.method) == ("gram64", "krylov")
        assert sine(whole.v_IK[:, 0], part.v_IK[:, 0]) < 2 * TOLERANCE
        assert sine(whole.u_OK[:, 0], part.u_OK[:, 0]) < 2 * TOLERANCE


def test_gains_alone_are_folded_in_and_a_random_frame_keeps_the_spectrum():
    w_OI, gain_D = matrix(np.random.default_rng(9), 200, 300, _spectrum(200)).astype(np.float32), _gains(300)
    np.testing.assert_allclose(framed(jnp.asarray(w_OI), krylov.gains(jnp.asarray(gain_D), False)), w_OI * gain_D, rtol=1e-6)
    turned = framed(jnp.asarray(w_OI), krylov.random_frame(jax.random.key(0), jnp.asarray(gain_D), False)) / gain_D
    np.testing.assert_allclose(*(np.linalg.svd(x, compute_uv=False) for x in (turned, w_OI)), atol=1e-5)
    assert np.abs(turned - w_OI).max() > 0.01


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_random_frames_are_as_good_as_haar(spread):
    """The null of the effective form: equal gains give chance, unequal ones more, and Haar frames give the same."""
    rng, d, draws = np.random.default_rng(10), 176, 30
    gain_D = np.exp(spread * rng.standard_normal(d)).astype(np.float32)
    spectrum = _spectrum(d)
    w_OI = jnp.asarray(matrix(rng, d, d, spectrum), jnp.float32)
    frames = [krylov.random_frame(jax.random.key(n), jnp.asarray(gain_D), False) for n in range(draws)]
    ours = null_leading(w_OI, frames, 0)
    haar = np.stack([gram64((frame(rng, d) * spectrum).T * gain_D)[2][:, 0] for _ in range(draws)])
    found, expected = (np.abs(x @ x.T)[np.triu_indices(draws, 1)] for x in (ours, haar))
    assert found.mean() == pytest.approx(expected.mean(), abs=0.02 if spread == 0 else 0.06)
    assert np.quantile(found, 0.9) == pytest.approx(np.quantile(expected, 0.9), abs=0.03 if spread == 0 else 0.12)
    assert (expected.mean() > 2 * nulls.cosine_mean(d)) == (spread > 0)


def _related(shape, seed=0):
    """Two layers with a leading subspace in common, and one that is not related."""
    rng, k = np.random.default_rng(seed), min(shape)
    base = matrix(rng, *shape, np.linspace(3, 1, 8))
    return [(scale * base + matrix(rng, *shape, _spectrum(k))).astype(np.float32) for scale in (1, 1, 0)]


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_sketched_gram_alignment_is_the_exact_one_within_its_error(shape):
    layers = _related(shape)
    exact = [np.asarray(gram_alignment(jnp.asarray(np.stack(x)))) for x in (layers, [w.T for w in layers])]
    deviations = []
    for seed in range(20):
        z = [np.asarray(sketch.probes(d, 16, seed)) for d in shape[::-1]]
        kept = []
        for w_OI in layers:
            (hz,) = sketch.apply_grams(jnp.asarray(w_OI), [None], *map(jnp.asarray, z), [float((w_OI**2).sum())])
            u_OK, s_K, vt_KI = np.linalg.svd(w_OI, full_matrices=False)
            vectors = (vt_KI[:8].T, u_OK[:, :8])
            kept.append([sketch.Sketch(np.asarray(h), x_DK, s_K[:8]) for h, x_DK in zip(hz, vectors)])
        for space in (0, 1):
            for pair in (0, 1):
                value, error = sketch.alignment(kept[pair][space], kept[pair + 1][space], z[space])
                assert 0 < error < 0.05
                deviations.append((value - exact[space][pair]) / error)
    assert abs(np.mean(deviations)) < 0.4
    assert 0.7 < np.std(deviations) < 1.5


@pytest.mark.parametrize("spread", [1.0, 1e-3])
@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (24, 24)])
def test_alignments_of_whole_decompositions_are_those_of_the_matrices(shape, spread):
    rng, k = np.random.default_rng(13), min(shape)
    base, first, second = (matrix(rng, *shape, 1 + spread * np.linspace(1, 0, k)).astype(np.float32) for _ in range(3))
    layers = [base, (base + spread * first).astype(np.float32), second]
    found = [decompose(jnp.asarray(w_OI), [None], 4, 0, TOLERANCE, 100)[0] for w_OI in layers]
    for pair in (0, 1):
        gram, sigma2 = alignments(found[pair], found[pair + 1])
        for space, sides in enumerate((("v_IK", False), ("u_OK", True))):
            stack = [w.astype(np.float64).T if sides[1] else w.astype(np.float64) for w in layers[pair : pair + 2]]
            grams = [w.T @ w - np.vdot(w, w) / w.shape[1] * np.eye(w.shape[1]) for w in stack]
            expected = np.vdot(*grams) / np.prod([np.linalg.norm(g) for g in grams])
            assert gram[space] == pytest.approx(expected, abs=1e-5 if spread == 1 else 2e-3)
            x_2DK = jnp.stack([getattr(one, sides[0]) for one in found[pair : pair + 2]])
            s_2K = jnp.stack([one.s_K for one in found[pair : pair + 2]]).astype(jnp.float32)
            assert sigma2[space] == pytest.approx(float(sigma2_alignment(x_2DK, s_2K)[0]), abs=1e-5)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30)])
def test_the_whole_decomposition_is_float64_s(shape):
    w_OI = matrix(np.random.default_rng(11), *shape, 0.8 ** np.arange(20)).astype(np.float32)
    u, s, v, residual = gram64(w_OI)
    expected = np.linalg.svd(w_OI.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(s, expected[1], rtol=1e-9)
    assert sine(u[:, :8], expected[0][:, :8]).max() < 1e-6
    assert sine(v[:, :8], expected[2][:8].T).max() < 1e-6
    assert residual < 1e-9
