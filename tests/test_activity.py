"""What activations do to real inputs: against float64 NumPy, and where the answer is known beforehand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gcjax.geometry import activity
from gcjax.models import mlp

L, B, D, W = 3, 40, 12, 9


def _measure(activation, rng, *, before=None, after=None, given=None, gradient=None, v1=None, u1=None):
    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    before = draw(L, B, D) if before is None else before
    arrays = [
        draw(L, B, W) if given is None else given,
        before,
        np.asarray(activation(jnp.asarray(before))) if after is None else after,
    ]
    more = [draw(L, D, W) if gradient is None else gradient, draw(L, W) if v1 is None else v1, draw(L, D) if u1 is None else u1]
    key = jax.random.key(0)
    return jax.jit(lambda *a: activity.measure(*a[:3], activation, *a[3:], key))(*map(jnp.asarray, arrays + more))


def test_against_numpy():
    rng = np.random.default_rng(0)
    given, before, gradient = (rng.standard_normal(shape) + 0.3 for shape in ((L, B, W), (L, B, D), (L, D, W)))
    v1, u1 = rng.standard_normal((L, W)), rng.standard_normal((L, D))
    f = np.tanh
    after = f(before) + 0.1
    single = [x.astype(np.float32) for x in (given, before, after, gradient, v1, u1)]
    found = _measure(lambda x: jnp.tanh(x) + 0.1, rng, given=single[0], before=single[1], after=single[2], gradient=single[3],
                     v1=single[4], u1=single[5])  # fmt: skip
    turn = np.asarray(activity.rotation(jax.random.key(0), D), np.float64)
    for layer in range(L):
        x, y, m = before[layer], after[layer], given[layer].mean(0)
        energy = np.sum(y**2)
        even, odd = (f(x) + 0.1 + f(-x) + 0.1) / 2, (f(x) + 0.1 - f(-x) - 0.1) / 2
        along = y - x * (np.sum(x * y) / np.sum(x * x))
        expected = {
            "before_rms_L": np.sqrt(np.mean(x**2)),
            "asymmetry_L": np.sum((f(x @ turn) + 0.1 - y @ turn) ** 2) / (2 * energy),
            "nonlinear_L": np.sum(along**2) / energy,
            "even_L": np.sum(even**2) / (np.sum(even**2) + np.sum(odd**2)),
            "mean_L": np.sum(y.mean(0) ** 2) / np.mean(np.sum(y**2, 1)),
            "input_mean_L": np.sum(m**2) / np.mean(np.sum(given[layer] ** 2, 1)),
            "v1_mean_L": abs(v1[layer] @ m) / np.linalg.norm(m),
            "u1_mean_L": abs(u1[layer] @ y.mean(0)) / np.linalg.norm(y.mean(0)),
            "gradient_mean_L": np.sum((gradient[layer] @ m / np.linalg.norm(m)) ** 2) / np.sum(gradient[layer] ** 2),
        }
        assert set(expected) == set(found._fields)
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(found, name)[layer], value, rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("activation", [*mlp.OWN_ACTIVATIONS])
def test_what_is_known_of_every_activation(activation):
    found = _measure(mlp.OWN_ACTIVATIONS[activation], np.random.default_rng(1))
    symmetric, odd = activation in ("none", "radial"), activation in ("none", "radial", "tanh", "softsign", "soft_threshold")
    assert (np.asarray(found.asymmetry_L) < 1e-10).all() if symmetric else (np.asarray(found.asymmetry_L) > 1e-4).all()
    assert (np.asarray(found.even_L) < 1e-10).all() if odd else (np.asarray(found.even_L) > 0.01).all()
    assert (np.asarray(found.nonlinear_L) < 1e-10).all() == (activation == "none")
    if activation == "abs":
        np.testing.assert_allclose(found.even_L, 1, rtol=1e-6)


def test_a_batch_without_its_mean_has_none_and_a_constant_is_all_mean():
    before = np.random.default_rng(2).standard_normal((L, B, D)).astype(np.float32)
    relu = np.maximum(before, 0)
    centred = _measure(lambda x: x, np.random.default_rng(3), before=before, after=relu - relu.mean(1, keepdims=True))
    assert (np.asarray(centred.mean_L) < 1e-10).all()
    constant = _measure(lambda x: x, np.random.default_rng(3), before=before, after=np.full_like(before, 0.7))
    np.testing.assert_allclose(constant.mean_L, 1, rtol=1e-5)


def test_gradients_and_vectors_along_the_mean_are_found_there_and_those_across_are_not():
    rng = np.random.default_rng(4)
    given = rng.standard_normal((L, B, W)).astype(np.float32)
    mean = given.mean(1)
    unit = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
    errors = rng.standard_normal((L, D)).astype(np.float32)
    along = _measure(lambda x: x, rng, given=given, gradient=np.einsum("lo,li->loi", errors, mean), v1=unit)
    np.testing.assert_allclose([along.gradient_mean_L, along.v1_mean_L], 1, rtol=1e-5)
    other = rng.standard_normal((L, W)).astype(np.float32)
    other -= np.einsum("li,li->l", other, unit)[:, None] * unit
    across = _measure(lambda x: x, rng, given=given, gradient=np.einsum("lo,li->loi", errors, other), v1=other)
    np.testing.assert_allclose([across.gradient_mean_L, across.v1_mean_L], 0, atol=1e-5)


def test_what_is_zero_has_no_share_and_is_no_nan():
    zeros = np.zeros((L, B, D), np.float32)
    found = _measure(lambda x: x, np.random.default_rng(5), before=zeros, gradient=np.zeros((L, D, W), np.float32))
    for name in ("asymmetry_L", "nonlinear_L", "even_L", "mean_L", "gradient_mean_L", "u1_mean_L"):
        np.testing.assert_array_equal(getattr(found, name), 0)
