"""The MLP against a forward pass written out by hand, its symmetries, and what its initial weights are."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import frame

from gcjax import config as configs
from gcjax.errors import GcjaxError
from gcjax.models import mlp

pytestmark = pytest.mark.usefixtures("strict_promotion")

STUDY = str(Path(__file__).parents[1] / "configs" / "mlp_ablation.py")
MECHANISM = str(Path(__file__).parents[1] / "configs" / "mlp_mechanism.py")
PIXELS, CLASSES, DEPTH, WIDTH = 12, 3, 3, 8


def _normalize(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "radial": lambda x: x * np.tanh(np.linalg.norm(x, axis=-1, keepdims=True)),
}
# Of a whole batch [B, D], with a = 2, c = 0.3 and a negative slope of -0.4.
OWN = {
    "abs": np.abs,
    "softsign": lambda x: x / (1 + np.abs(x)),
    "soft_threshold": lambda x: np.sign(x) * np.maximum(np.abs(x) - 1, 0),
    "radial_constant": lambda x: np.c_[ACTIVATIONS["radial"](x[:, :-1]), np.ones(len(x))],
    "relu_less_mean": lambda x: ACTIVATIONS["relu"](x) - ACTIVATIONS["relu"](x).mean(1, keepdims=True),
    "leaky_relu": lambda x: np.where(x > 0, x, -0.4 * x),
    "relu_less_batch_mean": lambda x: ACTIVATIONS["relu"](x) - ACTIVATIONS["relu"](x).mean(0),
}


def _config(**changes):
    config = configs.load(STUDY).model.unlock()
    config.update({"depth": DEPTH, "width": WIDTH, "init_gain": 1.0} | changes)
    return config


def _model(**changes):
    return mlp.build(_config(**changes), PIXELS, CLASSES)


def _params(model, seed=0, scale=0.5):
    """Parameters of which none keeps a special value: no zero bias, no unit gain."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.standard_normal(x.shape), x.dtype) for name, x in shapes.items()}


def _images(batch=5, seed=1):
    return np.random.default_rng(seed).integers(0, 256, (batch, PIXELS)).astype(np.uint8)


def _logits(model, params, images):
    return np.asarray(jax.jit(model.apply)(params, jnp.asarray(images)))


def _by_hand(config, stack_LOI, params, images):
    """Layer by layer in float64, every image a column: `y = W x`."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    logits = []
    for image in images.astype(np.float64) / 255:
        h = params["input"].T @ image
        for layer, w_OI in enumerate(np.asarray(stack_LOI, np.float64)):
            x = h if config.normalization == "none" else _normalize(h)
            if config.normalization == "layernorm_affine":
                x = x * params["norm_scale"][layer] + params["norm_shift"][layer]
            bias = params["hidden_bias"][layer] if config.bias else 0
            act = ACTIVATIONS[config.activation]
            y = act(w_OI @ x + bias) if config.form == "act_w" else w_OI @ act(x) + bias
            h = config.residual_scale * y + (h if config.residual else 0)
        logits.append(params["readout"].T @ h + (params["readout_bias"] if config.bias else 0))
    return np.array(logits)


AXES = (tuple(ACTIVATIONS), mlp.NORMALIZATIONS, mlp.FORMS)
OTHERS = ({"residual": True}, {"residual": False, "bias": True, "residual_scale": 0.7},
          {"residual": True, "bias": True, "residual_scale": 0.3})  # fmt: skip


@pytest.mark.parametrize(("a", "n", "f"), list(itertools.product(*(range(len(axis)) for axis in AXES))))
def test_every_variant_computes_what_it_says(a, n, f):
    names = dict(zip(("activation", "normalization", "form"), (axis[i] for axis, i in zip(AXES, (a, n, f)))))
    config = _config(**names, **OTHERS[(a + n + f) % 3])
    model = mlp.build(config, PIXELS, CLASSES)
    params, images = _params(model), _images()
    expected = _by_hand(config, model.stacks(params)["hidden"], params, images)
    np.testing.assert_allclose(_logits(model, params, images), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *OWN])
def test_activations_of_the_mechanism_study_scaled_and_shifted(activation):
    model = _model(activation=activation, activation_scale=2.0, activation_shift=0.3, negative_slope=-0.4)
    params, images = _params(model), _images()
    h_BD = images / 255 @ np.asarray(params["input"], np.float64)
    hidden = model.hidden(params, jnp.asarray(images))
    for layer, w_OI in enumerate(np.asarray(model.stacks(params)["hidden"], np.float64)):
        before_BD = h_BD @ w_OI.T
        after_BD = (ACTIVATIONS | OWN)[activation](2 * before_BD) / 2 + 0.3
        for found, expected in zip(hidden, (h_BD, before_BD, after_BD)):
            np.testing.assert_allclose(found[layer], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_allclose(model.activate(hidden.before_LBD[layer]), hidden.after_LBD[layer], rtol=1e-5, atol=1e-6)
        h_BD = h_BD + after_BD
    logits_BC = h_BD @ np.asarray(params["readout"])
    np.testing.assert_allclose(_logits(model, params, images), logits_BC, rtol=1e-4, atol=1e-4 * np.abs(logits_BC).max())


def test_what_the_matrix_is_given_is_the_activation_where_that_comes_first():
    hidden = (model := _model(activation="tanh", form="w_act")).hidden(_params(model), jnp.asarray(_images()))
    np.testing.assert_array_equal(hidden.input_LBD, hidden.after_LBD)
    np.testing.assert_allclose(hidden.after_LBD, np.tanh(hidden.before_LBD), rtol=1e-5, atol=1e-6)


def test_no_gradient_flows_through_the_mean_over_the_batch():
    model = _model(activation="relu_less_batch_mean")
    gradient = jax.grad(lambda x: model.activate(x).sum())(jnp.ones((4, WIDTH)))
    np.testing.assert_array_equal(gradient, 1)


def test_activations_are_those_of_the_studies():
    own = {*mlp.OWN_ACTIVATIONS, *mlp.TAKE_MORE}
    assert own == set(ACTIVATIONS) | set(OWN)
    presets = [configs.load(f"{MECHANISM}:{preset}") for preset in ("factorial", "dose")]
    assert {point["model"]["activation"] for preset in presets for point in preset.points} == own
    assert list(mlp.ACTIVATIONS) == list(ACTIVATIONS)
    assert set(runs_activations()) == set(ACTIVATIONS)


def runs_activations():
    """The activations that the points of the study's `paper` preset ask for."""
    return [point["model"]["activation"] for point in configs.load(f"{STUDY}:paper").points] + ["radial"]


def test_stacks_are_out_by_in_and_layers_come_first():
    params = {"hidden": jnp.arange(2 * 3 * 3, dtype=jnp.float32).reshape(2, 3, 3)}
    np.testing.assert_array_equal(mlp.stacks(params)["hidden"][1], params["hidden"][1].T)


def test_stacks_of_gradients_are_gradients_of_stacks():
    """A rank-one gradient: with one image its input side is that layer's input, which all images' gradients share."""
    model = _model(activation="none", residual=False, depth=2)
    params, images = _params(model), _images(batch=1)
    grads = jax.grad(lambda p: model.apply(p, jnp.asarray(images))[0, 0])(params)
    g_OI = np.asarray(model.stacks(grads)["hidden"][0], np.float64)
    x_I = np.asarray(params["input"], np.float64).T @ (images[0] / 255)
    _, s_K, vt_KI = np.linalg.svd(g_OI)
    assert s_K[1] < 1e-5 * s_K[0]
    assert abs(vt_KI[0] @ x_I / np.linalg.norm(x_I)) == pytest.approx(1, abs=1e-5)


def test_parameters_are_named_and_have_their_roles():
    plain, full = _model(), _model(bias=True, normalization="layernorm_affine")
    shapes = {name: x.shape for name, x in jax.eval_shape(full.init, jax.random.key(0)).items()}
    assert shapes == {
        "input": (PIXELS, WIDTH),
        "hidden": (DEPTH, WIDTH, WIDTH),
        "hidden_bias": (DEPTH, WIDTH),
        "norm_scale": (DEPTH, WIDTH),
        "norm_shift": (DEPTH, WIDTH),
        "readout": (WIDTH, CLASSES),
        "readout_bias": (CLASSES,),
    }
    assert set(jax.eval_shape(plain.init, jax.random.key(0))) == {"input", "hidden", "readout"}
    assert {name for name, role in full.roles.items() if role == "matrix"} == {"hidden"}
    assert {name for name, role in full.roles.items() if role == "embedding"} == {"input", "readout"}
    assert set(full.roles) == set(shapes)


magnitudes = st.integers(-30, 30).map(lambda decade: 10.0**decade)


@given(seed=st.integers(0, 2**32 - 1), scale=magnitudes)
def test_radial_and_its_gradient_are_finite_and_right_at_every_scale(seed, scale):
    x = (scale * np.random.default_rng(seed).standard_normal(6)).astype(np.float32)
    y, jacobian = np.asarray(mlp.radial(jnp.asarray(x))), np.asarray(jax.jacobian(mlp.radial)(jnp.asarray(x)))
    exact, norm = x.astype(np.float64), np.linalg.norm(x.astype(np.float64))
    np.testing.assert_allclose(y, exact * np.tanh(norm), rtol=1e-5, atol=1e-37)
    direction = exact / norm
    slope = np.tanh(norm) * np.eye(6) + norm / np.cosh(min(norm, 300)) ** 2 * np.outer(direction, direction)
    # Below about 1e-19 the square of x underflows: the gradient is then 0, where it would be as small as x.
    np.testing.assert_allclose(jacobian, slope, rtol=1e-4, atol=1e-6 * np.abs(slope).max() + 1e-18)


def test_radial_has_gradient_zero_at_zero_alone_and_in_a_batch():
    x = jnp.stack([jnp.zeros(5), jnp.ones(5)])
    gradient = np.asarray(jax.grad(lambda x: mlp.radial(x).sum())(x))
    np.testing.assert_array_equal(gradient[0], 0)
    assert (gradient[1] > 0).all()
    np.testing.assert_array_equal(jax.jacobian(mlp.radial)(jnp.zeros(5)), 0)
    second = jax.grad(lambda x: jax.grad(lambda x: mlp.radial(x).sum())(x).sum())(jnp.zeros(5))
    assert np.isfinite(second).all()


@given(seed=st.integers(0, 2**32 - 1), activation=st.sampled_from(list(ACTIVATIONS)))
def test_radial_and_none_turn_with_every_rotation_and_elementwise_ones_do_not(seed, activation):
    rng = np.random.default_rng(seed)
    q_DD, x_BD = frame(rng, 6).astype(np.float32), rng.standard_normal((7, 6)).astype(np.float32)
    act = mlp.ACTIVATIONS[activation]
    turned_after, turned_before = np.asarray(act(jnp.asarray(x_BD))) @ q_DD, np.asarray(act(jnp.asarray(x_BD @ q_DD)))
    off = np.abs(turned_after - turned_before).max()
    assert off < 1e-5 if activation in ("none", "radial") else off > 1e-2


@pytest.mark.parametrize(("form", "bias"), [("act_w", True), ("w_act", False)])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_rotated_residual_stream_is_the_same_network_exactly_where_the_activation_is_equivariant(activation, bias, form):
    model = _model(activation=activation, form=form, bias=bias)
    params, images = _params(model), _images()
    q = jnp.asarray(frame(np.random.default_rng(2), WIDTH), jnp.float32)  # h -> h q for every h in the stream
    turned = params | {
        "input": params["input"] @ q,
        "hidden": q.T @ params["hidden"] @ q,
        "readout": q.T @ params["readout"],
    }
    if bias:
        turned["hidden_bias"] = params["hidden_bias"] @ q
    plain, found = _logits(model, params, images), _logits(model, turned, images)
    off = np.abs(plain - found).max() / np.abs(plain).max()
    assert off < 1e-5 if activation in ("none", "radial") else off > 1e-2


def test_a_linear_network_is_the_product_of_its_matrices():
    model = _model(activation="none")
    params, images = _params(model), _images()
    w_LOI = np.asarray(model.stacks(params)["hidden"], np.float64)
    product = np.linalg.multi_dot([np.eye(WIDTH) + w for w in w_LOI[::-1]])
    expected = images / 255 @ np.asarray(params["input"], np.float64) @ product.T @ np.asarray(params["readout"])
    np.testing.assert_allclose(_logits(model, params, images), expected, rtol=1e-4, atol=1e-5)


def test_without_residual_and_with_zero_weights_nothing_comes_through():
    images = _images()
    for residual in (True, False):
        model = _model(residual=residual)
        params = _params(model) | {"hidden": jnp.zeros((DEPTH, WIDTH, WIDTH))}
        assert (_logits(model, params, images) != 0).any() == residual


@pytest.mark.parametrize("gain", [0.1, 2.0**0.5])
def test_initial_weights_have_the_spread_that_the_config_names(gain):
    depth, width, pixels = 8, 64, 784
    params = mlp.build(_config(depth=depth, width=width, init_gain=gain), pixels, 10).init(jax.random.key(0))
    for name, std in (("hidden", gain * width**-0.5), ("input", pixels**-0.5), ("readout", width**-0.5)):
        values = np.asarray(params[name], np.float64)
        assert values.std() == pytest.approx(std, rel=4 / np.sqrt(2 * values.size)), name
        assert abs(values.mean()) < 4 * std / np.sqrt(values.size), name
        assert np.mean(values**4) / std**4 == pytest.approx(3, rel=0.25), f"{name} is normal, not truncated or uniform"
    each = np.asarray(params["hidden"], np.float64).std(axis=(1, 2))
    np.testing.assert_allclose(each, gain * width**-0.5, rtol=4 / np.sqrt(2 * width**2))


def test_layers_and_keys_draw_apart():
    model = _model()
    init = jax.jit(model.init)
    one, again, other = (np.asarray(init(jax.random.key(seed))["hidden"]) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert (one != other).all()
    assert (one[0] != one[1]).all()


def test_biases_start_at_zero_and_gains_at_one():
    params = _model(bias=True, normalization="layernorm_affine").init(jax.random.key(0))
    for name, value in (("hidden_bias", 0), ("readout_bias", 0), ("norm_shift", 0), ("norm_scale", 1)):
        np.testing.assert_array_equal(params[name], value)


def test_a_seed_means_the_same_weights_in_every_variant():
    key = jax.random.key(3)
    plain = _model().init(key)
    for changes in ({"bias": True}, {"normalization": "layernorm_affine"}, {"activation": "radial", "residual": False}):
        params = _model(**changes).init(key)
        for name, value in plain.items():
            np.testing.assert_array_equal(params[name], value, err_msg=f"{name} with {changes}")


def test_affine_layernorm_starts_as_the_plain_one():
    images, key = _images(), jax.random.key(3)
    plain, affine = (_model(normalization=name) for name in ("layernorm", "layernorm_affine"))
    np.testing.assert_array_equal(_logits(plain, plain.init(key), images), _logits(affine, affine.init(key), images))


@pytest.mark.parametrize(("gain", "factor"), [(0.1, 10), (3.0**-0.5, 1e-3), (1.0, 7.3)])
def test_the_gain_scales_the_hidden_weights_and_nothing_else(gain, factor):
    key = jax.random.key(4)
    one, other = (_model(init_gain=g).init(key) for g in (gain, gain * factor))
    np.testing.assert_allclose(other["hidden"], one["hidden"] * np.float32(factor), rtol=1e-5)
    np.testing.assert_array_equal(other["input"], one["input"])
    np.testing.assert_array_equal(other["readout"], one["readout"])


def test_gain_and_residual_scale_may_be_traced():
    @jax.jit
    def logits(gain, scale):
        model = _model_of(init_gain=gain, residual_scale=scale)
        return model.apply(model.init(jax.random.key(5)), jnp.asarray(_images()))

    def _model_of(**changes):
        config = _config()
        bound = type(config)(config.to_dict(), type_safe=False)
        bound.update(changes)
        return mlp.build(bound, PIXELS, CLASSES)

    fixed = _model(init_gain=0.3, residual_scale=0.5)
    expected = _logits(fixed, fixed.init(jax.random.key(5)), _images())
    np.testing.assert_allclose(logits(jnp.float32(0.3), jnp.float32(0.5)), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("activation", "rellu", "did you mean 'relu'"),
        ("normalization", "layernrm", "did you mean 'layernorm'"),
        ("form", "actw", "did you mean 'act_w'"),
        ("activation", "zzz", "there are: none, relu, gelu, silu, tanh, radial"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(field, value, hint):
    with pytest.raises(GcjaxError, match=rf"model.{field}='{value}' does not exist; {hint}"):
        _model(**{field: value})
