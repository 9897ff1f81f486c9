"""Both solvers against float64 NumPy on matrices whose spectrum is prescribed; what they promise about bad layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import frame, matrix, sine, stack

from gcjax.errors import GcjaxError
from gcjax.geometry import spectra
from gcjax.geometry.continuity import angle_bound

pytestmark = pytest.mark.usefixtures("strict_promotion")

SOLVERS = ("svd", "gram")
SHAPES = ((8, 8), (11, 5), (5, 11), (2, 2))  # square, tall, wide, smallest
TINY_AND_HUGE = (1e-25, 1e-6, 1.0, 1e6, 1e25)  # gradients at the start, weights of a run that blows up
ROUNDING = 1e-5  # relative to s_1; float32 has 6e-8 an operation

triplets = jax.jit(spectra.triplets, static_argnames=("solver", "rank"))


@st.composite
def stacks(draw, scales=(1.0,)):
    """Three float32 layers of one shape, each with a spectrum of its own over three decades, at some scale."""
    out, into = draw(st.sampled_from(SHAPES))
    decades = st.lists(st.floats(-3, 0), min_size=min(out, into), max_size=min(out, into))
    spectra_LK = [np.sort(10.0 ** np.array(draw(decades)))[::-1] for _ in range(3)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    w_LOI = np.stack([matrix(rng, out, into, spectrum) for spectrum in spectra_LK])
    return (w_LOI * draw(st.sampled_from(scales))).astype(np.float32)


def _found(w_LOI, solver, rank=None):
    return spectra.Triplets(*(np.asarray(x) for x in triplets(jnp.asarray(w_LOI), solver=solver, rank=rank)))


def _exact(w_LOI):
    return np.linalg.svd(w_LOI.astype(np.float64), full_matrices=False)


def _same(one: spectra.Triplets, other: spectra.Triplets, layers: list[int]) -> bool:
    return all(x[layers].tobytes() == y[layers].tobytes() for x, y in zip(one, other))


@pytest.mark.parametrize("solver", SOLVERS)
@given(w_LOI=stacks(TINY_AND_HUGE))
def test_singular_values_are_numpy_s(solver, w_LOI):
    found, (_, s_LK, _) = _found(w_LOI, solver), _exact(w_LOI)
    largest_L1 = s_LK[:, :1]
    # Squaring costs the gram solver the end of the spectrum below sqrt(eps) s_1, never its head.
    tail = ROUNDING if solver == "svd" else 4 * np.sqrt(np.finfo(np.float32).eps)
    assert (np.abs(found.s_LK - s_LK) <= tail * largest_L1).all()
    assert (np.abs(found.s_LK - s_LK) / largest_L1 <= ROUNDING)[:, 0].all()
    assert (found.s_LK >= 0).all()
    assert (np.diff(found.s_LK) <= tail * largest_L1).all(), "in falling order"


@pytest.mark.parametrize("solver", SOLVERS)
@given(w_LOI=stacks(TINY_AND_HUGE))
def test_leading_vectors_are_numpy_s_wherever_the_gap_exceeds_one_percent(solver, w_LOI):
    found, (u_LOK, s_LK, vt_LKI) = _found(w_LOI, solver), _exact(w_LOI)
    for layer in np.flatnonzero(s_LK[:, 0] > 1.01 * s_LK[:, 1]):
        for mine, exact in (
            (found.v_LIK[layer, :, 0], vt_LKI[layer, 0]),
            (found.u_LOK[layer, :, 0], u_LOK[layer, :, 0]),
        ):
            assert abs(mine.astype(np.float64) @ exact) == pytest.approx(1, abs=1e-4)
            assert sine(mine, exact) < 2e-4


@pytest.mark.parametrize("solver", SOLVERS)
@given(w_LOI=stacks())
def test_triplets_are_what_they_say(solver, w_LOI):
    """`W v = s u` and `W^T u = s v` for every triplet above 1% of the first; columns are orthonormal."""
    found = _found(w_LOI, solver)
    # The gram solver takes the longer side's vectors as W's image of the others, divided by s_k.
    derived = ROUNDING * (100 if solver == "gram" else 1)
    for w_OI, u_OK, s_K, v_IK in zip(w_LOI.astype(np.float64), found.u_LOK, found.s_LK, found.v_LIK):
        sound = s_K > 1e-2 * s_K[0]
        u_OK, s_K, v_IK = u_OK[:, sound], s_K[sound], v_IK[:, sound]
        np.testing.assert_allclose(w_OI @ v_IK, s_K * u_OK, atol=derived * s_K[0])
        np.testing.assert_allclose(w_OI.T @ u_OK, s_K * v_IK, atol=derived * s_K[0])
        np.testing.assert_allclose(v_IK.T @ v_IK, np.eye(sound.sum()), atol=derived)
        np.testing.assert_allclose(u_OK.T @ u_OK, np.eye(sound.sum()), atol=derived)


@pytest.mark.parametrize("shape", SHAPES)
def test_solvers_agree(shape):
    w_LOI = stack(np.random.default_rng(0), 3, *shape, np.geomspace(1, 0.1, min(shape)))
    svd, gram = (_found(w_LOI, solver) for solver in SOLVERS)
    np.testing.assert_allclose(svd.s_LK, gram.s_LK, rtol=1e-5)
    for layer in range(3):
        assert (sine(svd.v_LIK[layer], gram.v_LIK[layer]) < 1e-3).all()
        assert (sine(svd.u_LOK[layer], gram.u_LOK[layer]) < 1e-3).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_a_rank_cuts_the_full_result(solver, shape):
    w_LOI = stack(np.random.default_rng(1), 3, *shape, np.geomspace(1, 0.1, min(shape)))
    full, cut = _found(w_LOI, solver), _found(w_LOI, solver, rank=1)
    assert cut.u_LOK.shape == (3, shape[0], 1)
    assert cut.v_LIK.shape == (3, shape[1], 1)
    for whole, leading in zip(full[:3], cut[:3]):
        np.testing.assert_allclose(leading, whole[..., :1], rtol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("out", "into", "rank"), [(8, 8, 1), (11, 5, 3), (5, 11, 3)])
def test_rank_deficient_matrices_keep_their_leading_triplets(solver, out, into, rank):
    w_LOI = stack(np.random.default_rng(2), 3, out, into, np.linspace(1, 0.5, rank))
    found, (u_LOK, s_LK, vt_LKI) = _found(w_LOI, solver), _exact(w_LOI)
    assert all(np.isfinite(x).all() for x in found)
    np.testing.assert_allclose(found.s_LK[:, :rank], s_LK[:, :rank], rtol=1e-5)
    assert (found.s_LK[:, rank:] < ROUNDING).all()
    for layer in range(3):
        assert (sine(found.v_LIK[layer, :, :rank], vt_LKI[layer, :rank].T) < 1e-4).all()
        assert (sine(found.u_LOK[layer, :, :rank], u_LOK[layer, :, :rank]) < 1e-4).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_zero_matrix_has_zero_singular_values_and_no_nan(solver, shape):
    w_LOI = stack(np.random.default_rng(3), 3, *shape, np.geomspace(1, 0.1, min(shape)))
    w_LOI[1] = 0
    found = _found(w_LOI, solver)
    assert (found.s_LK[1] == 0).all()
    assert found.residual_L[1] == 0
    assert all(np.isfinite(x).all() for x in found)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_that_is_not_finite_is_nan_and_leaves_the_others_alone_bit_for_bit(solver, bad, shape):
    w_LOI = stack(np.random.default_rng(4), 3, *shape, np.geomspace(1, 0.1, min(shape)))
    clean = _found(w_LOI, solver)
    w_LOI[1, -1, 0] = bad
    found = _found(w_LOI, solver)
    assert all(np.isnan(x[1]).all() for x in found)
    assert _same(found, clean, [0, 2])
    assert all(np.isfinite(x[[0, 2]]).all() for x in found)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("power", [-85, -60, 60, 110])
def test_a_scale_moves_the_singular_values_alone(solver, power):
    """Powers of two down to 3e-26 and up to 1e33 are exact in float32, and so must be the answer."""
    w_LOI = stack(np.random.default_rng(5), 3, 8, 8, np.geomspace(1, 0.1, 8))
    scale = np.float32(2.0**power)
    plain, scaled = _found(w_LOI, solver), _found(w_LOI * scale, solver)
    np.testing.assert_array_equal(scaled.s_LK, plain.s_LK * scale)
    np.testing.assert_array_equal(scaled.v_LIK, plain.v_LIK)
    np.testing.assert_array_equal(scaled.u_LOK, plain.u_LOK)
    np.testing.assert_array_equal(scaled.residual_L, plain.residual_L * scale)


@pytest.mark.parametrize("solver", SOLVERS)
@given(w_LOI=stacks(TINY_AND_HUGE))
def test_the_bound_on_the_angle_holds(solver, w_LOI):
    found, (u_LOK, s_LK, vt_LKI) = _found(w_LOI, solver), _exact(w_LOI)
    bound_L = np.asarray(angle_bound(spectra.Triplets(*map(jnp.asarray, found))), np.float64)
    for layer, bound in enumerate(bound_L):
        if s_LK[layer, 0] < (1 + 1e-4) * s_LK[layer, 1]:
            continue  # no gap, nothing to compare with
        error = max(sine(found.v_LIK[layer, :, 0], vt_LKI[layer, 0]), sine(found.u_LOK[layer, :, 0], u_LOK[layer, :, 0]))
        assert np.sin(bound) >= error
        if s_LK[layer, 0] > 1.1 * s_LK[layer, 1]:
            assert bound < 1e-4, "and it is of use where the gap is open"


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(SHAPES[:3]),
    gap=st.floats(1.01, 3.0),
    turn=st.floats(1e-4, 1.5),
    share=st.floats(0, 1),
    rayleigh=st.booleans(),
)
def test_the_bound_holds_for_a_solver_that_stopped_early(seed, shape, gap, turn, share, rayleigh):
    """Vectors turned away from the true ones by a known angle, as an iteration leaves them: the bound is no smaller."""
    rng, k = np.random.default_rng(seed), min(shape)
    w_LOI = stack(rng, 2, *shape, np.concatenate([[gap], np.geomspace(1, 0.1, k - 1)]))

    def sloppy(w_LOI):
        u_LOK, s_LK, vt_LKI = np.linalg.svd(np.asarray(w_LOI, np.float64), full_matrices=False)
        v_LIK = vt_LKI.swapaxes(-1, -2).copy()
        for x_LDK, angle in ((u_LOK, share * turn), (v_LIK, turn)):
            for x_DK in x_LDK:
                aside = rng.standard_normal(len(x_DK))
                aside -= x_DK[:, 0] * (x_DK[:, 0] @ aside)
                x_DK[:, 0] = np.cos(angle) * x_DK[:, 0] + np.sin(angle) * aside / np.linalg.norm(aside)
        if rayleigh:
            s_LK[:, 0] = np.einsum("lo,loi,li->l", u_LOK[..., 0], np.asarray(w_LOI, np.float64), v_LIK[..., 0])
        return tuple(jnp.asarray(x, jnp.float32) for x in (u_LOK, s_LK, v_LIK))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(spectra.SOLVERS, "sloppy", sloppy)
        found = spectra.triplets(jnp.asarray(w_LOI), "sloppy")
    assert (np.sin(np.asarray(angle_bound(found))) >= (1 - 1e-3) * np.sin(turn)).all()


def test_the_bound_is_void_without_a_gap_and_nan_without_a_matrix():
    rng = np.random.default_rng(6)
    w_LOI = np.stack([frame(rng, 6), np.full((6, 6), np.nan), np.diag([2.0, 1, 1, 1, 1, 1])])
    bound_L = np.asarray(angle_bound(spectra.triplets(jnp.asarray(w_LOI, jnp.float32), "svd")))
    assert bound_L[0] == pytest.approx(np.pi / 2)
    assert np.isnan(bound_L[1])
    assert bound_L[2] < 1e-5


@pytest.mark.parametrize("rank", [0, -1, 6])
def test_a_rank_that_the_matrices_do_not_have_is_refused(rank):
    with pytest.raises(GcjaxError, match=rf"rank {rank} is outside 1\.\.5, the ranks of a 5 x 7 matrix"):
        spectra.triplets(jnp.ones((2, 5, 7)), "svd", rank)


def test_an_unknown_solver_is_refused_with_the_nearest_name():
    with pytest.raises(GcjaxError, match="no solver 'grm'; did you mean 'gram'"):
        spectra.triplets(jnp.ones((2, 4, 4)), "grm")


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_layer_alone_and_runs_side_by_side_give_the_same(solver):
    w_RLOI = np.stack([stack(np.random.default_rng(seed), 3, 8, 8, np.geomspace(1, 0.1, 8)) for seed in (7, 8)])
    together = jax.jit(jax.vmap(partial(spectra.triplets, solver=solver)))(w_RLOI)
    for run, w_LOI in enumerate(w_RLOI):
        alone = _found(w_LOI, solver)
        np.testing.assert_allclose(together.s_LK[run], alone.s_LK, rtol=1e-6)
        np.testing.assert_allclose(np.abs(np.sum(together.v_LIK[run] * alone.v_LIK, axis=1)), 1, atol=1e-6)
        np.testing.assert_allclose(_found(w_LOI[:1], solver).s_LK, alone.s_LK[:1], rtol=1e-6)
