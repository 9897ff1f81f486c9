"""The measures against an independent float64 implementation, their invariances, and what becomes of bad layers."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st
from matrices import frame, matrix, stack

import gcjax.geometry
from gcjax.errors import GcjaxError
from gcjax.geometry import nulls
from gcjax.geometry.continuity import Continuity, measure, measure_jit

pytestmark = pytest.mark.usefixtures("strict_promotion")

SOLVERS = ("svd", "gram")
SHAPES = ((8, 8), (11, 5), (5, 11))
INPUT, OUTPUT = 0, 1
RANK = 4
# Fields of Continuity that say nothing about a common scale, nor about the frame of the vectors.
SCALE_FREE = (
    "cosine_APK",
    "overlap_APK",
    "gram_alignment_AP",
    "sigma2_alignment_AP",
    "layer_cosine_ALL",
    "gap_L",
    "flagged_P",
)
BY_SPACE = SCALE_FREE[:5]


def _numpy(c):
    return Continuity(*(np.asarray(x) for x in c))


def _measure(w_LOI, rank=RANK, solver="svd") -> Continuity:
    return _numpy(measure_jit(jnp.asarray(w_LOI, jnp.float32), rank=rank, solver=solver))


def _distinct(seed, shape=(8, 8), layers=4):
    """Layers whose spectra fall by a fifth a rank, each with another tail: every singular vector is well defined."""
    rng = np.random.default_rng(seed)
    k = min(shape)
    spectra = [0.8 ** np.arange(k) * (1 + 0.02 * rng.standard_normal(k)) for _ in range(layers)]
    return np.stack([matrix(rng, *shape, s) for s in spectra]).astype(np.float32)


def _related(seed, shape=(8, 8), layers=4):
    """Neighbours that share a good part of themselves."""
    w_LOI = _distinct(seed, shape, layers).astype(np.float64)
    for layer in range(1, layers):
        w_LOI[layer] = 0.7 * w_LOI[layer - 1] + 0.3 * w_LOI[layer]
    return w_LOI.astype(np.float32)


def _oracle(w_LOI, rank=RANK) -> dict[str, np.ndarray]:
    """The definitions, one pair and one number at a time, in float64."""
    w_LOI = w_LOI.astype(np.float64)
    layers = [np.linalg.svd(w, full_matrices=False) for w in w_LOI]
    found = {name: [] for name in BY_SPACE}
    for space in (INPUT, OUTPUT):
        frames = [vt.T if space == INPUT else u for u, _, vt in layers]
        grams = [w.T @ w if space == INPUT else w @ w.T for w in w_LOI]
        grams = [g - np.trace(g) / len(g) * np.eye(len(g)) for g in grams]
        for rows in found.values():
            rows.append([])
        for a, b, g, h, (_, s, _), (_, t, _) in zip(frames, frames[1:], grams, grams[1:], layers, layers[1:]):
            cosines = [abs(a[:, k] @ b[:, k]) for k in range(len(s))]
            found["cosine_APK"][-1].append(cosines[:rank])
            overlaps = [np.linalg.norm(a[:, :k].T @ b[:, :k]) ** 2 / k for k in range(1, rank + 1)]
            found["overlap_APK"][-1].append(overlaps)
            found["gram_alignment_AP"][-1].append(np.sum(g * h) / np.linalg.norm(g) / np.linalg.norm(h))
            share = (s**2 / np.sum(s**2) + t**2 / np.sum(t**2)) / 2
            found["sigma2_alignment_AP"][-1].append(share @ cosines)
        found["layer_cosine_ALL"][-1] = [[abs(a[:, 0] @ b[:, 0]) for b in frames] for a in frames]
    singular = np.array([s for _, s, _ in layers])
    exact = {name: np.array(rows) for name, rows in found.items()}
    return exact | {"sigma_LK": singular[:, :rank], "spectrum_LM": singular, "gap_L": singular[:, 0] / singular[:, 1]}


@pytest.mark.parametrize("solver", SOLVERS)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from(SHAPES), make=st.sampled_from([_distinct, _related]))
def test_every_measure_is_its_definition(solver, seed, shape, make):
    w_LOI = make(seed, shape)
    found = _measure(w_LOI, solver=solver)._asdict()
    for name, exact in _oracle(w_LOI).items():
        assert found[name].shape == exact.shape, name
        # A gap may close by accident in `_related`; then the vectors are anybody's.
        if make is _distinct or name in ("gram_alignment_AP", "spectrum_LM", "sigma_LK"):
            np.testing.assert_allclose(found[name], exact, atol=2e-4, err_msg=name)


def test_leading_vectors_are_handed_out_in_their_own_space():
    w_LOI = _distinct(0, (11, 5))
    found = _measure(w_LOI)
    u_LOK, _, vt_LKI = np.linalg.svd(w_LOI.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(np.abs(np.sum(found.leading_v_LI * vt_LKI[:, 0], axis=1)), 1, atol=1e-6)
    np.testing.assert_allclose(np.abs(np.sum(found.leading_u_LO * u_LOK[..., 0], axis=1)), 1, atol=1e-6)


def _planted(shared, layers=4, out=11, into=5):
    """Layers whose leading direction in the `shared` space is one and the same, orthogonal ones in the other space."""
    rng = np.random.default_rng(1)
    v_IK, u_OK = frame(rng, into), frame(rng, out)
    rows = []
    for layer in range(layers):
        u, v = (u_OK[:, layer], v_IK[:, 0]) if shared == INPUT else (u_OK[:, 0], v_IK[:, layer])
        rows.append(np.outer(u, v) + 0.01 * rng.standard_normal((out, into)))
    return np.stack(rows), (v_IK if shared == INPUT else u_OK)[:, 0]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shared", [INPUT, OUTPUT])
def test_orientation_a_direction_shared_in_one_space_is_found_there_and_nowhere_else(shared, solver):
    w_LOI, direction = _planted(shared)
    found, other = _measure(w_LOI, solver=solver), 1 - shared
    for name in BY_SPACE:
        value = getattr(found, name)
        if name == "layer_cosine_ALL":
            value = value[:, ~np.eye(len(w_LOI), dtype=bool)]
        if name.endswith("K"):
            value = value[..., 0]
        assert value[shared].min() > 0.9, name
        assert value[other].max() < 0.25, name
    leading = (found.leading_v_LI, found.leading_u_LO)[shared]
    np.testing.assert_allclose(np.abs(leading @ direction), 1, atol=0.02)
    assert found.leading_v_LI.shape == (4, 5)
    assert found.leading_u_LO.shape == (4, 11)


def _assert_same(one, other, names=SCALE_FREE, spaces=slice(None), atol=2e-4):
    for name in names:
        a, b = getattr(one, name), getattr(other, name)
        if name in BY_SPACE:
            a, b = a[spaces], b[spaces]
        np.testing.assert_allclose(a, b, atol=atol, err_msg=name)


seeds_and_shapes = given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from(SHAPES))


@seeds_and_shapes
def test_turning_each_layer_s_output_changes_the_output_space_alone(seed, shape):
    w_LOI, rng = _distinct(seed, shape), np.random.default_rng([seed, 1])
    turned = np.stack([frame(rng, shape[0]) @ w for w in w_LOI])
    plain, found = _measure(w_LOI), _measure(turned)
    _assert_same(plain, found, spaces=[INPUT])
    np.testing.assert_allclose(found.sigma_LK, plain.sigma_LK, atol=1e-5)
    for name in BY_SPACE:
        assert np.abs(getattr(plain, name)[OUTPUT] - getattr(found, name)[OUTPUT]).max() > 1e-3, name


@seeds_and_shapes
def test_turning_each_layer_s_input_changes_the_input_space_alone(seed, shape):
    w_LOI, rng = _distinct(seed, shape), np.random.default_rng([seed, 1])
    plain, found = _measure(w_LOI), _measure(np.stack([w @ frame(rng, shape[1]) for w in w_LOI]))
    _assert_same(plain, found, spaces=[OUTPUT])
    for name in BY_SPACE:
        assert np.abs(getattr(plain, name)[INPUT] - getattr(found, name)[INPUT]).max() > 1e-3, name


@seeds_and_shapes
def test_one_rotation_of_all_layers_changes_no_measure(seed, shape):
    w_LOI, rng = _distinct(seed, shape), np.random.default_rng([seed, 1])
    q_OO, q_II = frame(rng, shape[0]), frame(rng, shape[1])
    plain, found = _measure(w_LOI), _measure(q_OO @ w_LOI @ q_II.T)
    _assert_same(plain, found)
    np.testing.assert_allclose(np.abs(np.sum(found.leading_v_LI * (plain.leading_v_LI @ q_II.T), axis=1)), 1, atol=1e-5)
    np.testing.assert_allclose(np.abs(np.sum(found.leading_u_LO * (plain.leading_u_LO @ q_OO.T), axis=1)), 1, atol=1e-5)


@seeds_and_shapes
def test_signs_change_no_measure(seed, shape):
    """Of whole layers, and of single singular triplets: `s u v^T` is `s (-u) (-v)^T`, whichever the solver returns."""
    w_LOI = _distinct(seed, shape)
    signs = np.random.default_rng(seed).choice([-1, 1], size=len(w_LOI))
    _assert_same(_measure(w_LOI), _measure(w_LOI * signs[:, None, None]))


@given(seed=st.integers(0, 2**32 - 1), decades=st.lists(st.floats(-20, 20), min_size=4, max_size=4))
def test_a_layer_s_scale_changes_its_sigma_alone(seed, decades):
    w_LOI, scale = _distinct(seed), (10.0 ** np.array(decades)).astype(np.float32)
    plain, found = _measure(w_LOI), _measure(w_LOI * scale[:, None, None])
    _assert_same(plain, found)
    np.testing.assert_allclose(found.sigma_LK, plain.sigma_LK * scale[:, None], rtol=1e-4)
    np.testing.assert_allclose(found.spectrum_LM[:, :RANK], found.sigma_LK)


@seeds_and_shapes
def test_reversed_layers_reverse_the_pairs(seed, shape):
    w_LOI = _related(seed, shape)
    plain, found = _measure(w_LOI), _measure(w_LOI[::-1])
    for name in ("cosine_APK", "overlap_APK", "gram_alignment_AP", "sigma2_alignment_AP"):
        np.testing.assert_allclose(getattr(found, name), getattr(plain, name)[:, ::-1], atol=1e-4, err_msg=name)
    np.testing.assert_allclose(found.layer_cosine_ALL, plain.layer_cosine_ALL[:, ::-1, ::-1], atol=1e-4)
    np.testing.assert_array_equal(found.flagged_P, plain.flagged_P[::-1])


@pytest.mark.parametrize("solver", SOLVERS)
@seeds_and_shapes
def test_the_transposed_stack_swaps_the_spaces(solver, seed, shape):
    w_LOI = _distinct(seed, shape)
    plain, found = _measure(w_LOI, solver=solver), _measure(w_LOI.swapaxes(1, 2), solver=solver)
    for name in BY_SPACE:
        np.testing.assert_allclose(getattr(found, name), getattr(plain, name)[::-1], atol=2e-4, err_msg=name)


@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from(SHAPES))
def test_measures_stay_in_their_range_and_overlap_holds_the_cosine(seed, shape):
    found = _measure(_related(seed, shape))
    for name in BY_SPACE:
        assert (np.abs(getattr(found, name)) <= 1 + 1e-5).all(), name
        assert name == "gram_alignment_AP" or (getattr(found, name) >= 0).all(), name
    np.testing.assert_allclose(found.overlap_APK[..., 0], found.cosine_APK[..., 0] ** 2, atol=1e-5)


def test_subspaces_of_any_two_layers_are_those_that_scipy_finds():
    w_LOI = _distinct(4, (9, 7))
    found = _measure(w_LOI, rank=5)
    for space, frames in ((INPUT, [np.linalg.svd(w)[2].T for w in w_LOI]), (OUTPUT, [np.linalg.svd(w)[0] for w in w_LOI])):
        for a, m, k in itertools.product(range(4), range(4), range(1, 6)):
            angles = scipy.linalg.subspace_angles(frames[a][:, :k], frames[m][:, :k])
            np.testing.assert_allclose(found.layer_overlap_ALLK[space, a, m, k - 1], np.mean(np.cos(angles) ** 2), atol=1e-5)
            inside = np.linalg.norm(frames[m][:, :k].T @ frames[a][:, 0]) ** 2
            np.testing.assert_allclose(found.containment_ALLK[space, a, m, k - 1], inside, atol=1e-5)
    np.testing.assert_allclose(found.containment_ALLK[..., 0], found.layer_cosine_ALL**2, atol=1e-5)


def test_what_is_mixed_inside_a_subspace_has_not_left_it():
    rng, spectrum = np.random.default_rng(0), np.array([4.0, 3, 2, 1, 0.5])
    u_LOO, v_II = [frame(rng, 6) for _ in range(2)], frame(rng, 5)
    turned_II = v_II.copy()
    turned_II[:, :3] = v_II[:, :3] @ frame(rng, 3)
    w_LOI = [u[:, :5] * spectrum @ v.T for u, v in zip(u_LOO, (v_II, turned_II))]
    inside = _measure(np.asarray(w_LOI, np.float32), rank=4).containment_ALLK[INPUT, 0, 1]
    assert inside[0] < 0.95
    np.testing.assert_allclose(inside[2:], 1, atol=1e-5)


def test_all_of_a_space_overlaps_with_itself():
    overlaps = _measure(_distinct(1, (11, 5)), rank=5).overlap_APK
    np.testing.assert_allclose(overlaps[INPUT, :, -1], 1, atol=1e-4)
    assert (overlaps[OUTPUT, :, -1] < 0.9).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_identical_layers_score_one(shape, solver):
    found = _measure(np.repeat(_distinct(2, shape)[:1], 4, axis=0), solver=solver)
    for name in BY_SPACE:
        np.testing.assert_allclose(getattr(found, name), 1, atol=1e-5, err_msg=name)
    assert not found.flagged_P.any()


@pytest.mark.parametrize("solver", SOLVERS)
def test_layers_in_orthogonal_subspaces_score_zero(solver):
    w_LOI = np.zeros((4, 8, 8), np.float32)
    w_LOI[::2, :4, :4] = np.diag([4, 3, 2, 1])
    w_LOI[1::2, 4:, 4:] = np.diag([4, 3, 2, 1])
    found = _measure(w_LOI, solver=solver)
    for name in ("cosine_APK", "overlap_APK", "sigma2_alignment_AP"):
        np.testing.assert_allclose(getattr(found, name), 0, atol=1e-6, err_msg=name)
    assert (found.gram_alignment_AP < 0).all(), "traceless Gram matrices that avoid each other are anticorrelated"


def test_gram_alignment_of_random_square_matrices_is_zero_not_one_half():
    d = 24
    w_LOI = np.random.default_rng(3).standard_normal((200, d, d))
    found = _measure(w_LOI, rank=1).gram_alignment_AP
    std = nulls.gram_alignment_std(d)
    assert np.abs(found.mean(axis=1)).max() < 4 * std / np.sqrt(199)
    np.testing.assert_allclose(found.std(axis=1), std, rtol=0.2)
    assert np.abs(found).max() < 6 * std < 0.4


@pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3, 1e-4])
def test_gram_alignment_of_nearly_orthogonal_matrices(spread):
    """The trace is all but everything here: taken out too late, it takes the digits with it."""
    rng = np.random.default_rng(4)
    w_LOI = stack(rng, 4, 8, 8, np.sort(1 + spread * rng.uniform(-1, 1, 8))[::-1])
    found = _measure(w_LOI).gram_alignment_AP
    np.testing.assert_allclose(found, _oracle(w_LOI)["gram_alignment_AP"], atol=1e-6 / spread)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_stays_in_its_own_pairs(solver, bad):
    w_LOI = _distinct(5)
    clean = _measure(w_LOI, solver=solver)
    w_LOI[1, 2, 3] = bad
    found = _measure(w_LOI, solver=solver)
    lost, kept = [0, 1], [2]
    for name in ("cosine_APK", "overlap_APK", "gram_alignment_AP", "sigma2_alignment_AP"):
        value = getattr(found, name)
        assert np.isnan(value[:, lost]).all(), name
        assert value[:, kept].tobytes() == getattr(clean, name)[:, kept].tobytes(), name
    assert np.isnan(found.layer_cosine_ALL[:, 1]).all()
    assert np.isnan(found.layer_cosine_ALL[:, :, 1]).all()
    others = np.ix_([0, 1], [0, 2, 3], [0, 2, 3])
    assert found.layer_cosine_ALL[others].tobytes() == clean.layer_cosine_ALL[others].tobytes()
    for name in ("sigma_LK", "spectrum_LM", "gap_L", "angle_bound_L", "leading_v_LI", "leading_u_LO"):
        value = getattr(found, name)
        assert np.isnan(value[1]).all(), name
        assert value[[0, 2, 3]].tobytes() == getattr(clean, name)[[0, 2, 3]].tobytes(), name
    np.testing.assert_array_equal(found.flagged_P, [True, True, False])


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_zero_matrix_gives_nan_cosines_and_is_flagged(solver):
    w_LOI = _distinct(6)
    clean = _measure(w_LOI, solver=solver)
    w_LOI[3] = 0
    found = _measure(w_LOI, solver=solver)
    for name in ("cosine_APK", "overlap_APK", "gram_alignment_AP", "sigma2_alignment_AP"):
        value = getattr(found, name)
        assert np.isnan(value[:, 2]).all(), name
        assert value[:, :2].tobytes() == getattr(clean, name)[:, :2].tobytes(), name
    assert np.isnan(found.layer_cosine_ALL[:, 3]).all()
    assert np.isnan(found.leading_v_LI[3]).all()
    assert np.isnan(found.leading_u_LO[3]).all()
    assert np.isnan(found.gap_L[3])
    np.testing.assert_array_equal(found.sigma_LK[3], 0)
    np.testing.assert_array_equal(found.flagged_P, [False, False, True])


@pytest.mark.parametrize("solver", SOLVERS)
def test_ranks_beyond_a_matrix_s_own_are_nan_and_those_within_are_not(solver):
    rng = np.random.default_rng(7)
    w_LOI = np.stack([matrix(rng, 8, 8, np.linspace(1, 0.5, k)) for k in (1, 2, 3, 8)]).astype(np.float32)
    found = _measure(w_LOI, solver=solver)
    for name in ("cosine_APK", "overlap_APK"):
        finite = np.isfinite(getattr(found, name))
        for pair, rank in enumerate((1, 2, 3)):
            assert finite[:, pair, :rank].all(), name
            # Below sqrt(eps) s_1 the gram solver cannot tell nothing from little.
            assert solver == "gram" or not finite[:, pair, rank:].any(), name
    assert np.isfinite(found.sigma2_alignment_AP).all()
    assert np.isfinite(found.gram_alignment_AP).all()
    assert not found.flagged_P.any()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_pair_with_a_gap_under_one_percent_is_flagged_and_never_dropped(solver):
    rng = np.random.default_rng(8)
    w_LOI = np.stack([matrix(rng, 8, 8, np.r_[gap, np.ones(7) * 0.9]) for gap in (1, 0.9 * 1.02, 0.9 * 1.005, 1)])
    found = _measure(w_LOI, solver=solver)
    np.testing.assert_array_equal(found.flagged_P, [False, True, True])
    assert np.isfinite(found.cosine_APK[:, :, 0]).all()
    np.testing.assert_allclose(found.gap_L, [1 / 0.9, 1.02, 1.005, 1 / 0.9], rtol=1e-4)


def test_a_matrix_of_rank_one_has_an_infinite_gap_and_is_trusted():
    w_LOI = np.zeros((4, 8, 8), np.float32)
    w_LOI[:, 1, 2] = 1
    found = _measure(w_LOI)
    assert np.isinf(found.gap_L).all()
    assert not found.flagged_P.any()
    np.testing.assert_array_equal(found.cosine_APK[..., 0], 1)
    assert np.isnan(found.cosine_APK[..., 1:]).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_gradients_near_nothing_and_weights_near_infinity_are_measured(solver, scale):
    w_LOI = _distinct(9)
    _assert_same(_measure(w_LOI, solver=solver), _measure(w_LOI * np.float32(scale), solver=solver))


@pytest.mark.parametrize("solver", SOLVERS)
def test_runs_side_by_side_are_runs_one_by_one(solver):
    w_RLOI = np.stack([_distinct(seed) for seed in range(3)])
    w_RLOI[1, 0, 0, 0] = np.nan
    together = _numpy(jax.jit(jax.vmap(partial(measure, rank=RANK, solver=solver)))(w_RLOI))
    for run, w_LOI in enumerate(w_RLOI):
        alone = _measure(w_LOI, solver=solver)
        for name in (*SCALE_FREE, "sigma_LK", "spectrum_LM"):
            np.testing.assert_allclose(getattr(together, name)[run], getattr(alone, name), atol=1e-5, err_msg=name)


def test_the_same_shape_is_compiled_once():
    _measure(_distinct(10, (7, 6)))
    before = measure_jit._cache_size()
    _measure(_distinct(11, (7, 6)))
    gcjax.geometry.continuity(_distinct(12, (7, 6)).astype(np.float64), rank=RANK)
    assert measure_jit._cache_size() == before


class Tensor:
    """What another framework's tensor shows of itself: DLPack, `detach` and `contiguous`, no `__array__`."""

    def __init__(self, array, requires_grad=True):
        self.array, self.requires_grad = array, requires_grad

    def __dlpack__(self, **options):
        if self.requires_grad:
            raise BufferError("cannot export a tensor that requires a gradient; use detach()")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def detach(self):
        return Tensor(self.array, requires_grad=False)

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array), self.requires_grad)


SPREAD = np.repeat(_distinct(13, (6, 9)), 2, axis=2)[..., ::2]  # every second column of memory
FORMS = {
    "numpy float32": lambda w: w,
    "numpy float64": lambda w: w.astype(np.float64),
    "jax": jnp.asarray,
    "tuple of numpy": tuple,
    "list of jax": lambda w: [jnp.asarray(x) for x in w],
    "lists of numbers": lambda w: w.tolist(),
    "tensor": Tensor,
    "tensor float64": lambda w: Tensor(w.astype(np.float64)),
    "list of tensors": lambda w: [Tensor(x) for x in w],
    "transposed tensor": lambda w: Tensor(np.ascontiguousarray(w.swapaxes(1, 2)).swapaxes(1, 2)),
    "strided tensor": lambda w: Tensor(SPREAD),
    "strided tensors": lambda w: [Tensor(x) for x in SPREAD],
    "mixed precision": lambda w: [w[0].astype(np.float64), *w[1:]],
}


@pytest.fixture
def standard_promotion():
    """A user's list may mix precisions; promoting them is what is asked for."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("form", FORMS)
def test_a_stack_may_come_from_anywhere(form):
    w_LOI = _distinct(13, (6, 9))
    found = gcjax.geometry.continuity(FORMS[form](w_LOI), rank=RANK)
    assert found.cosine_APK.dtype == jnp.float32
    _assert_same(_numpy(found), _measure(w_LOI), atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.int32, bool])
def test_half_precision_and_integers_are_measured_as_they_are_stored_in_float32(dtype):
    w_LOI = (8 * _distinct(14)).astype(dtype)
    found = gcjax.geometry.continuity(w_LOI, rank=RANK)
    assert found.cosine_APK.dtype == jnp.float32
    np.testing.assert_allclose(found.spectrum_LM, np.linalg.svd(w_LOI.astype(np.float64))[1], atol=1e-4)


def test_double_precision_is_kept_where_jax_has_it_switched_on():
    w_LOI = _distinct(15).astype(np.float64) * 1e-60
    with jax.enable_x64(True):
        found = gcjax.geometry.continuity(w_LOI, rank=RANK)
        assert found.cosine_APK.dtype == jnp.float64
        found = _numpy(found)
    for name, exact in _oracle(w_LOI).items():
        np.testing.assert_allclose(getattr(found, name), exact, rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (np.ones((4, 4)), r"a stack is \[layers >= 2, out >= 2, in >= 2\], this one has the shape \(4, 4\)"),
        (np.ones((1, 4, 4)), r"has the shape \(1, 4, 4\)"),
        (np.ones((3, 1, 4)), r"has the shape \(3, 1, 4\)"),
        (np.ones((3, 4, 1)), r"has the shape \(3, 4, 1\)"),
        (np.ones((2, 2, 4, 4)), r"has the shape \(2, 2, 4, 4\)"),
        ([], r"has the shape \(0,\)"),
        ([np.ones((4, 4)), np.ones((4, 5))], r"must have one shape, these have \(4, 4\), \(4, 5\)"),
        ([np.ones((4, 4)), np.ones(4)], r"must have one shape, these have \(4,\), \(4, 4\)"),
        (np.ones((3, 4, 4)) * 1j, "must be real, these are complex"),
        ([[[1, 2], [3]], [[1, 2], [3]]], "a list cannot be read as an array"),
        ((np.ones((4, 4)) for _ in range(3)), "a generator cannot be read as an array"),
        (None, "a NoneType cannot be read as an array"),
        (np.array([None, "x"]), "a ndarray cannot be read as an array"),
    ],
)
def test_what_is_no_stack_is_refused_in_one_sentence(matrices, message):
    with pytest.raises(GcjaxError, match=message):
        gcjax.geometry.continuity(matrices, rank=2)


@pytest.mark.parametrize("rank", [0, -1, 6])
def test_a_rank_that_the_matrices_do_not_have_is_refused(rank):
    with pytest.raises(GcjaxError, match=rf"rank {rank} is outside 1\.\.5, the ranks of a 6 x 5 matrix"):
        gcjax.geometry.continuity(np.ones((3, 6, 5)), rank=rank)


def test_an_unknown_solver_is_refused():
    with pytest.raises(GcjaxError, match="there is no solver 'svdd'; did you mean 'svd'"):
        gcjax.geometry.continuity(np.ones((3, 6, 5)), rank=2, solver="svdd")


def test_ranks_are_eight_unless_the_matrices_are_smaller():
    for shape, ranks in (((9, 12), 8), ((9, 5), 5)):
        found = jax.eval_shape(gcjax.geometry.continuity, jnp.zeros((4, *shape)))
        assert found.cosine_APK.shape == (2, 3, ranks)


def test_without_the_whole_spectrum_the_two_alignments_alone_are_left_out():
    w_LOI = jnp.asarray(_related(12))
    found, brief = (_numpy(jax.jit(partial(measure, rank=RANK, solver="svd"))(w_LOI, whole=flag)) for flag in (True, False))
    for name, value in brief._asdict().items():
        if name in ("gram_alignment_AP", "sigma2_alignment_AP"):
            assert np.isnan(value).all()
            assert not np.isnan(getattr(found, name)).any()
        else:
            np.testing.assert_array_equal(value, getattr(found, name))
