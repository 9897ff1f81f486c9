"""Moves that change nothing and those that do, in float64, by the model itself; projections against dense algebra."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from matrices import frame

from gcjax import config as configs
from gcjax.geometry import symmetry
from gcjax.models import mlp

PIXELS, CLASSES, DEPTH, WIDTH, IMAGES = 14, 4, 3, 6, 20
ACTIVATIONS = (*mlp.OWN_ACTIVATIONS, *mlp.TAKE_MORE)
BOUNDARY = ("general", "rotation", "diagonal")


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _section(**changes):
    section = configs.load("configs/mlp_ablation.py").model.unlock()
    section.update({"depth": DEPTH, "width": WIDTH, "residual_scale": 0.7, "negative_slope": -0.3} | changes)
    return section


def _network(**changes):
    section, rng = _section(**changes), np.random.default_rng(0)
    model = mlp.build(section, PIXELS, CLASSES)
    shapes = {"input": (PIXELS, WIDTH), "hidden": (DEPTH, WIDTH, WIDTH), "readout": (WIDTH, CLASSES)}
    params = {name: jnp.asarray(0.5 * rng.standard_normal(shape)) for name, shape in shapes.items()}
    images = jnp.asarray(rng.integers(0, 256, (IMAGES, PIXELS)).astype(np.uint8))
    form = symmetry.Form(float(section.residual), section.residual_scale)
    return section, params, form, jax.jit(lambda w: model.apply(w, images))


def _labels():
    return jnp.asarray(np.random.default_rng(1).integers(0, CLASSES, IMAGES))


def _direction(params, form, family, key=0):
    direction = symmetry.generators(jax.random.key(key), family, params)
    return direction * symmetry.norm(params) / symmetry.norm(symmetry.tangent(params, form, direction))


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_finite_moves_change_the_function_where_and_only_where_no_symmetry_is_listed(activation, residual):
    scale = 5.0 if activation == "soft_threshold" else 1.0  # else nothing gets through
    section, params, form, logits_of = _network(activation=activation, residual=residual, activation_scale=scale)
    known = symmetry.symmetries(section)
    for family in symmetry.FAMILIES:
        moved = symmetry.finite(params, form, _direction(params, form, family), 0.3)
        assert all(float(jnp.abs(moved[name] - params[name]).max()) > 1e-3 for name in ("hidden",))
        off = float(jnp.abs(logits_of(moved) - logits_of(params)).max() / jnp.abs(logits_of(params)).max())
        assert off < 1e-12 if family in known else off > 1e-4, (family, off)


@pytest.mark.parametrize(("changes", "known"), [
    ({"normalization": "layernorm"}, ("shift",)),
    ({"normalization": "layernorm", "activation": "gelu"}, ("shift",)),
    ({"normalization": "layernorm", "activation": "none", "form": "w_act"}, ()),
    ({"activation": "none", "activation_shift": 0.2}, ()),
    ({"activation": "radial", "form": "w_act"}, ("common rotation", "rotation but one")),
])  # fmt: skip
def test_normalization_shift_and_form(changes, known):
    section, params, form, logits_of = _network(**changes)
    assert symmetry.symmetries(section) == known
    for family in known:
        off = logits_of(symmetry.finite(params, form, _direction(params, form, family), 0.3)) - logits_of(params)
        assert float(jnp.abs(off).max()) < 1e-12


def test_biases_are_not_covered():
    assert symmetry.symmetries(_section(bias=True)) == symmetry.symmetries(_section(normalization="layernorm_affine")) == ()


@pytest.mark.parametrize("family", symmetry.FAMILIES)
def test_tangent_and_curve_are_the_derivatives_of_finite_moves(family):
    _, params, form, _ = _network()
    direction = _direction(params, form, family)
    moves = [lambda t, f=f: f(params, form, direction, t) for f in (symmetry.finite, symmetry.curve)]
    one, zero = jnp.ones(()), jnp.zeros(())
    firsts = [jax.jvp(move, (zero,), (one,))[1] for move in moves]
    seconds = [jax.jvp(lambda t, m=move: jax.jvp(m, (t,), (one,))[1], (zero,), (one,))[1] for move in moves]
    for name in params:
        np.testing.assert_allclose(firsts[0][name], symmetry.tangent(params, form, direction)[name], atol=1e-10)
        np.testing.assert_allclose(firsts[1][name], firsts[0][name], atol=1e-10)
        np.testing.assert_allclose(seconds[1][name], seconds[0][name], atol=1e-10)


CASES = (("none", "general"), ("none", "rotation"), ("radial", "common rotation"), ("leaky_relu", "common diagonal"),
         ("tanh", "rotation"), ("gelu", "general"))  # fmt: skip


@pytest.mark.parametrize(("activation", "family"), CASES)
def test_slope_and_curvatures_vanish_along_symmetries_and_are_right_elsewhere(activation, family):
    section, params, form, logits_of = _network(activation=activation)
    direction, labels = _direction(params, form, family), _labels()
    path = lambda t: symmetry.curve(params, form, direction, t)  # noqa: E731
    far = symmetry.finite(params, form, direction, 0.01)
    found = symmetry.respond(path, far, logits_of, labels)
    if family in symmetry.symmetries(section):
        np.testing.assert_allclose(found[1:], 0, atol=1e-10)
        return

    def loss(t):
        logits = np.asarray(logits_of(symmetry.finite(params, form, direction, t)))
        return (scipy.special.logsumexp(logits, axis=1) - logits[np.arange(IMAGES), labels]).mean()

    h = 1e-4
    np.testing.assert_allclose(found.slope, (loss(h) - loss(-h)) / (2 * h), rtol=1e-5)
    np.testing.assert_allclose(found.curvature, (loss(h) - 2 * loss(0) + loss(-h)) / h**2, rtol=1e-3)
    np.testing.assert_allclose(found.finite, loss(0.01) - loss(0), rtol=1e-6)
    jacobian = (np.asarray(logits_of(path(h))) - np.asarray(logits_of(path(-h)))) / (2 * h)
    p = scipy.special.softmax(np.asarray(logits_of(params)), axis=1)
    spread = [g @ (np.diag(q) - np.outer(q, q)) @ g for g, q in zip(jacobian, p)]
    np.testing.assert_allclose(found.gauss_newton, np.mean(spread), rtol=1e-5)


def _flat(tree):
    return np.concatenate([np.asarray(tree[name]).ravel() for name in ("input", "hidden", "readout")])


@pytest.mark.parametrize("family", BOUNDARY)
def test_the_share_of_a_motion_along_moves_is_its_projection(family):
    _, params, form, _ = _network()
    motion = symmetry.like(jax.random.key(3), params)
    shape, basis = (DEPTH + 1, WIDTH, WIDTH), []
    for index in itertools.product(*map(range, shape)):
        direction = symmetry.within(family, jnp.zeros(shape).at[index].set(1.0))
        basis.append(_flat(symmetry.tangent(params, form, direction)))
    u, s, _ = np.linalg.svd(np.asarray(basis).T, full_matrices=False)
    u = u[:, s > 1e-10 * s[0]]
    expected = np.linalg.norm(u.T @ _flat(motion)) ** 2 / np.linalg.norm(_flat(motion)) ** 2
    share, residual = symmetry.share_of_motion(params, form, motion, family, 500)
    np.testing.assert_allclose(share, expected, rtol=1e-4)
    assert residual < 1e-4
    along = symmetry.tangent(params, form, symmetry.generators(jax.random.key(4), family, params))
    np.testing.assert_allclose(symmetry.share_of_motion(params, form, along, family, 500)[0], 1, rtol=1e-6)
    assert symmetry.share_of_motion(params, form, motion, family, 2)[0] <= expected


def test_gauges_that_were_turned_are_turned_back():
    _, params, form, logits_of = _network(activation="none")
    rng = np.random.default_rng(5)
    small = np.stack([scipy.linalg.expm(0.2 * (a - a.T)) for a in rng.standard_normal((DEPTH + 1, WIDTH, WIDTH))])
    turned = symmetry.move(params, form, jnp.asarray(small))
    eye = jnp.broadcast_to(jnp.eye(WIDTH), small.shape)
    q = symmetry.gauges(turned, form, params, eye, 500)
    back = symmetry.move(turned, form, q)
    for name, value in params.items():
        np.testing.assert_allclose(back[name], value, atol=1e-6)
    np.testing.assert_allclose(logits_of(back), logits_of(params), rtol=1e-6)


def test_gauges_stay_orthogonal_and_end_nearest_among_their_neighbours_from_anywhere():
    _, params, form, _ = _network()
    rng, target = np.random.default_rng(6), symmetry.like(jax.random.key(7), params)
    start = jnp.asarray(np.stack([frame(rng, WIDTH) for _ in range(DEPTH + 1)]))

    def distance(q):
        return float(symmetry.norm(jax.tree.map(jnp.subtract, symmetry.move(params, form, q), target)))

    found = [symmetry.gauges(params, form, target, start, sweeps) for sweeps in (1, 5, 500)]
    for q in found:
        np.testing.assert_allclose(q @ q.swapaxes(-1, -2), np.broadcast_to(np.eye(WIDTH), q.shape), atol=1e-10)
    assert distance(start) > distance(found[0]) > distance(found[1]) > distance(found[2])
    for a in rng.standard_normal((20, DEPTH + 1, WIDTH, WIDTH)):
        near = found[2] @ jnp.asarray(scipy.linalg.expm(1e-2 * (a - a.swapaxes(-1, -2))))
        assert distance(near) > distance(found[2])
