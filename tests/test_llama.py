"""The decoder against a forward pass written out by hand, its symmetries, causality, and what its initial weights are."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import frame
from ml_collections import ConfigDict

from gcjax.errors import GcjaxError
from gcjax.models import llama, mlp

pytestmark = pytest.mark.usefixtures("strict_promotion")

UNSCALED = {"kind": "none", "factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "factors": ()}  # fmt: skip
LLAMA3 = {"kind": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0,
          "original_max_position_embeddings": 64}  # fmt: skip
# No two of width, heads * head_dim, key_value_heads * head_dim and mlp_width agree.
BASE = {
    "kind": "llama",
    "vocabulary": 31,
    "width": 20,
    "depth": 3,
    "heads": 4,
    "key_value_heads": 2,
    "head_dim": 6,
    "mlp_width": 28,
    "activation": "silu",
    "attention": "softmax",
    "value_activation": "none",
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "max_length": 0,
    "rope": True,
    "rope_theta": 100.0,
    "rope_scaling": UNSCALED,
    "qkv_bias": False,
    "qk_norm": False,
    "tied": False,
    "residual": True,
    "init_std": 0.02,
    "remat": False,
    "dtype": "float32",
}
EMBEDDINGS, GAINS = ("embedding", "head"), ("attention_norm", "mlp_norm", "final_norm", "q_norm", "k_norm")


def _config(scaling=None, **changes):
    return ConfigDict(BASE | changes | {"rope_scaling": UNSCALED | (scaling or {})})


def _model(**changes):
    return llama.build(_config(**changes))


def _params(model, seed=0, scale=0.4):
    """Parameters of which none keeps a special value: no zero bias, no unit gain."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.standard_normal(x.shape), x.dtype) for name, x in shapes.items()}


def _tokens(batch=2, length=9, seed=1):
    return np.random.default_rng(seed).integers(0, BASE["vocabulary"], (batch, length)).astype(np.uint16)


def _logits(model, params, tokens):
    return np.asarray(jax.jit(model.apply)(params, jnp.asarray(tokens)))


def _key(seed):
    return jax.random.key(seed, impl="rbg")  # compiles in a fraction of threefry's time


BASE_INIT = jax.jit(_model().init)


def _loss(model):
    def loss(params, tokens):
        log_p_BTV = jax.nn.log_softmax(model.apply(params, tokens))
        return -jnp.take_along_axis(log_p_BTV[:, :-1], tokens[:, 1:, None].astype(jnp.int32), -1).mean()

    return loss


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.where(x > 0, x, 0),
    "none": lambda x: x,
    "tanh": np.tanh,
    "radial": lambda x: x * np.tanh(np.linalg.norm(x, axis=-1, keepdims=True)),
}


def _normalize(x, gain, kind, eps=BASE["norm_eps"]):
    if kind == "none":
        return x
    x = x - x.mean() if kind == "layernorm" else x
    return gain * x / np.sqrt((x * x).mean() + eps)


def _turn(x, position, theta, scaling):
    """Each pair (i, i + E/2) as a complex number, times e^(i angle)."""
    half = len(x) // 2
    turned = np.empty_like(x)
    for i in range(half):
        frequency = theta ** (-2 * i / len(x))
        if scaling["kind"] == "linear":
            frequency /= scaling["factor"]
        elif scaling["kind"] == "factors":
            frequency /= scaling["factors"][i]
        elif scaling["kind"] == "llama3":
            wavelength, context = 2 * np.pi / frequency, scaling["original_max_position_embeddings"]
            low, high = context / scaling["low_freq_factor"], context / scaling["high_freq_factor"]
            if wavelength > low:
                frequency /= scaling["factor"]
            elif wavelength > high:
                blend = (context / wavelength - context / low) / (context / high - context / low)
                frequency *= blend + (1 - blend) / scaling["factor"]
        z = complex(x[i], x[i + half]) * np.exp(1j * frequency * position)
        turned[i], turned[i + half] = z.real, z.imag
    return turned


def _by_hand(config, stacks, params, tokens):
    """Layer by layer, token by token and head by head in float64: `y = W x`."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    w = {name: np.asarray(value, np.float64) for name, value in stacks.items()}
    ones, act = np.ones((config.depth, 1)), ACTIVATIONS[config.activation]
    group, E = config.heads // config.key_value_heads, config.head_dim

    def project(name, layer, x, position):
        y = (w[name][layer] @ x + (p[f"{name}_bias"][layer] if config.qkv_bias else 0)).reshape(-1, E)
        if name == "v":
            return [ACTIVATIONS[config.value_activation](head) for head in y]
        y = [_normalize(head, p[f"{name}_norm"][layer], "rmsnorm") for head in y] if config.qk_norm else y
        return [_turn(head, position, config.rope_theta, config.rope_scaling) for head in y] if config.rope else y

    def logits(sequence):
        h = [p["embedding"][token] for token in sequence]
        for layer in range(config.depth):
            x = [_normalize(a, p.get("attention_norm", ones)[layer], config.norm) for a in h]
            q, k, v = ([project(name, layer, a, t) for t, a in enumerate(x)] for name in ("q", "k", "v"))
            for t in range(len(h)):
                heads = []
                for i in range(config.heads):
                    j = i // group
                    weight = np.array([q[t][i] @ k[s][j] / np.sqrt(E) for s in range(t + 1)])
                    weight = weight / (t + 1) if config.attention == "linear" else np.exp(weight) / np.exp(weight).sum()
                    heads.append(sum(weight[s] * v[s][j] for s in range(t + 1)))
                y = w["o"][layer] @ np.concatenate(heads)
                a = h[t] + y if config.residual else y
                n = _normalize(a, p.get("mlp_norm", ones)[layer], config.norm)
                y = w["down"][layer] @ (act(w["gate"][layer] @ n) * (w["up"][layer] @ n))
                h[t] = a + y if config.residual else y
        h = [_normalize(a, p.get("final_norm"), config.norm) for a in h]
        return np.array(h) @ (p["embedding"].T if config.tied else p["head"])

    return np.array([logits(sequence) for sequence in tokens])


VARIANTS = [
    {},
    {"activation": "gelu", "norm": "layernorm", "qkv_bias": True},
    {"activation": "relu", "qk_norm": True, "tied": True, "key_value_heads": 1},
    {"activation": "none", "norm": "none", "tied": True, "key_value_heads": 4},
    {"activation": "radial", "residual": False, "scaling": {"kind": "linear", "factor": 3.0}},
    {"norm": "none", "residual": False, "qk_norm": True, "qkv_bias": True, "remat": True},
    {"norm": "layernorm", "tied": True, "scaling": LLAMA3, "rope_theta": 1000.0},
    {"scaling": {"kind": "factors", "factors": (1.0, 1.7, 8.0)}, "depth": 1},
    {"attention": "linear", "value_activation": "relu", "key_value_heads": 1, "max_length": 9},
    {"attention": "linear", "rope": False, "head_dim": 5, "value_activation": "radial", "qkv_bias": True},
    {"attention": "linear", "key_value_heads": 4, "activation": "tanh", "qk_norm": True, "value_activation": "gelu"},
    {"rope": False, "value_activation": "silu", "qkv_bias": True},
    {"value_activation": "tanh", "key_value_heads": 1},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_variant_computes_what_it_says(changes):
    config = _config(**changes)
    model = llama.build(config)
    # Without norms every layer cubes what it gets.
    params, tokens = _params(model, scale=0.15 if config.norm == "none" else 0.4), _tokens()
    expected = _by_hand(config, model.stacks(params), params, tokens)
    found = _logits(model, params, tokens)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5 * np.abs(expected).max())


def test_the_variants_cover_what_there_is():
    configs = [_config(**changes) for changes in VARIANTS]
    assert {config.norm for config in configs} == set(llama.NORMS)
    assert {config.activation for config in configs} == set(ACTIVATIONS) == set(mlp.ACTIVATIONS)
    assert {config.value_activation for config in configs} == set(ACTIVATIONS)
    assert {(config.attention, config.rope) for config in configs} == set(itertools.product(llama.ATTENTIONS, (True, False)))
    assert {config.rope_scaling.kind for config in configs} == set(llama.ROPE_SCALINGS)


def _reach(model, params, length=6):
    """How far each token's embedding moves each position's logits: [logits at t, token at s]."""
    weight_V = jnp.asarray(np.random.default_rng(3).standard_normal(BASE["vocabulary"]), jnp.float32)

    def read_T(embedding):  # token s is entry s of the vocabulary, so its row is used at position s alone
        return (model.apply(params | {"embedding": embedding}, jnp.arange(length)[None])[0] * weight_V).sum(-1)

    jacobian_TVD = jax.jit(jax.jacfwd(read_T))(params["embedding"])
    return np.linalg.norm(np.asarray(jacobian_TVD, np.float64), axis=-1)[:, :length]


NEW = [
    {"attention": attention, "rope": rope, "value_activation": value}
    for attention, rope, value in itertools.product(llama.ATTENTIONS, (True, False), ACTIVATIONS)
]


@pytest.mark.parametrize(
    "changes", [*NEW, {"key_value_heads": 4, "norm": "layernorm"}, {"qk_norm": True, "remat": True}], ids=str
)
def test_no_logit_depends_on_a_later_token_and_every_one_on_all_before(changes):
    model = _model(**changes)
    reach = _reach(model, _params(model))
    np.testing.assert_array_equal(reach[np.triu_indices(6, 1)], 0)
    assert (reach[np.tril_indices(6)] > 1e-4 * reach.max()).all()


def test_the_causality_test_sees_attention_that_looks_ahead(monkeypatch):
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, is_causal: attention(q, k, v))
    model = _model()
    reach = _reach(model, _params(model))
    assert (reach[np.triu_indices(6, 1)] > 1e-4 * reach.max()).all()


def test_sequences_of_a_batch_do_not_meet_and_what_follows_changes_nothing_before():
    model = _model()
    params, tokens = _params(model), _tokens(batch=3)
    whole, changed = _logits(model, params, tokens), tokens.copy()
    np.testing.assert_allclose(_logits(model, params, tokens[::-1]), whole[::-1], rtol=1e-4, atol=1e-5)
    changed[0], changed[1:, 4:] = 0, 1
    found = _logits(model, params, changed)
    np.testing.assert_allclose(found[1:, :4], whole[1:, :4], rtol=1e-4, atol=1e-5)
    assert np.abs(found[1:, 4:] - whole[1:, 4:]).max() > 0.1


def test_a_token_outside_the_vocabulary_makes_its_sequence_nan_and_is_not_taken_for_another():
    model = _model()
    found = _logits(model, _params(model), np.array([[1, 2], [1, BASE["vocabulary"]]], np.int32))
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


def test_rematerialization_changes_neither_loss_nor_gradients_and_is_there():
    plain, remat = _model(), _model(remat=True)
    params, tokens = _params(plain), jnp.asarray(_tokens())
    (loss, grads), (again, same) = (jax.jit(jax.value_and_grad(_loss(m)))(params, tokens) for m in (plain, remat))
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(same[name], grad, rtol=1e-4, atol=1e-5 * np.abs(grad).max(), err_msg=name)
    T = tokens.shape[1]
    kept = [jax.eval_shape(lambda p, m=m: jax.vjp(lambda q: _loss(m)(q, tokens), p)[1], params) for m in (plain, remat)]
    layers = [[x for x in jax.tree.leaves(left) if x.shape[:2] == (BASE["depth"], len(tokens) * T)] for left in kept]
    assert len(layers[0]) > len(layers[1]) == 0  # products of tokens with weights
    assert not any(x.shape[-2:] == (T, T) for left in kept for x in jax.tree.leaves(left))


@pytest.mark.parametrize("changes", [{}, {"attention": "linear", "rope": False, "value_activation": "radial"}], ids=str)
def test_bfloat16_computes_near_float32_with_logits_and_gradients_in_float32(monkeypatch, changes):
    attention = jax.nn.dot_product_attention

    def not_strict(*args, **options):  # it promotes bfloat16 itself
        with jax.numpy_dtype_promotion("standard"):
            return attention(*args, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", not_strict)
    changes = changes | {"qk_norm": True, "qkv_bias": True}
    exact, half = _model(**changes), _model(**changes, dtype="bfloat16")
    params, tokens = _params(exact), jnp.asarray(_tokens())
    a, b = _logits(exact, params, tokens), _logits(half, params, tokens)
    assert b.dtype == np.float32
    off = np.linalg.norm(a - b) / np.linalg.norm(a)
    assert 1e-4 < off < 0.05
    with jax.numpy_dtype_promotion("standard"):
        grads = jax.eval_shape(jax.grad(_loss(half)), params, tokens)
    assert {grad.dtype for grad in grads.values()} == {jnp.dtype("float32")}
    small = {name: value.astype("bfloat16") for name, value in params.items()}
    np.testing.assert_allclose(_logits(half, small, tokens), b, rtol=0.05, atol=0.05 * np.abs(b).max())


@given(seed=st.integers(0, 2**32 - 1), shift=st.integers(0, 500), kind=st.sampled_from(llama.ROPE_SCALINGS))
def test_only_the_distance_of_two_tokens_enters_their_attention_score(seed, shift, kind):
    scaling = UNSCALED | LLAMA3 | {"kind": kind, "factors": (1.0, 2.0, 3.0, 4.0)}
    turning = jnp.asarray(llama.frequencies(8, 100.0, scaling), jnp.float32)
    rng = np.random.default_rng(seed)
    q, k = (jnp.asarray(rng.standard_normal((1, 5, 2, 8)), jnp.float32) for _ in range(2))
    at = jnp.arange(5)

    def scores(q_positions, k_positions):
        turned = llama.rotate(q, q_positions, turning), llama.rotate(k, k_positions, turning)
        return np.asarray(jnp.einsum("BTHE,BSHE->BHTS", *turned))

    here = scores(at, at)
    np.testing.assert_allclose(scores(at + shift, at + shift), here, atol=2e-3)
    assert np.abs(scores(at + shift + 1, at + shift) - here).max() > 1e-2
    np.testing.assert_allclose(np.linalg.norm(llama.rotate(q, at, turning), axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(llama.rotate(q, at, turning)[:, 0], q[:, 0])


@given(factor=st.floats(1, 64), low=st.floats(0.25, 2), ratio=st.floats(1.5, 8), context=st.integers(16, 2**17))
def test_llama3_scaling_keeps_short_waves_slows_long_ones_and_blends_between(factor, low, ratio, context):
    scaling = {"kind": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": low * ratio,
               "original_max_position_embeddings": context}  # fmt: skip
    plain, scaled = llama.frequencies(64, 5e5, UNSCALED), llama.frequencies(64, 5e5, scaling)
    slowed, waves = plain / scaled, 2 * np.pi / plain
    np.testing.assert_allclose(slowed[waves < context / (low * ratio)], 1, rtol=1e-12)
    np.testing.assert_allclose(slowed[waves > context / low], factor, rtol=1e-12)
    assert (np.diff(slowed) > -1e-9).all()
    assert (slowed >= 1 - 1e-9).all()
    assert (slowed <= factor * (1 + 1e-9)).all()


def test_a_rotated_residual_stream_is_the_same_network_under_rmsnorm_and_not_under_layernorm():
    q = jnp.asarray(frame(np.random.default_rng(2), BASE["width"]), jnp.float32)  # h -> h q for every h in the stream
    for norm, same in (("rmsnorm", True), ("none", True), ("layernorm", False)):
        model = _model(norm=norm)
        params = _params(model)
        params |= {name: jnp.ones_like(value) for name, value in params.items() if name in GAINS}
        turned = params | {name: q.T @ params[name] for name in ("q", "k", "v", "gate", "up", "head")}
        turned |= {name: params[name] @ q for name in ("embedding", "o", "down")}
        plain, found = _logits(model, params, _tokens()), _logits(model, turned, _tokens())
        off = np.abs(plain - found).max() / np.abs(plain).max()
        assert off < 1e-4 if same else off > 1e-2, norm


def _out_of(kernel_LIO, g_EE):
    """A kernel whose output is that of the given one, each head `x` of it turned to `x g`."""
    L, I, O = kernel_LIO.shape  # noqa: E741
    heads_LIHE = kernel_LIO.reshape(L, I, -1, len(g_EE)) @ jnp.asarray(g_EE, jnp.float32)
    return heads_LIHE.reshape(L, I, O)


def _into(kernel_LIO, g_EE):
    """A kernel that makes of heads `x g` what the given one makes of `x`."""
    return _out_of(kernel_LIO.swapaxes(1, 2), np.linalg.inv(g_EE).T).swapaxes(1, 2)


def _off(model, params, changed):
    """By how much of the largest logit the changed parameters change any."""
    expected = _logits(model, params, _tokens())
    return np.abs(_logits(model, params | changed, _tokens()) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("attention", llama.ATTENTIONS)
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_queries_and_keys_may_be_turned_together_unless_rotary_embedding_tells_their_entries_apart(attention, key_value_heads):
    turn = frame(np.random.default_rng(7), BASE["head_dim"])
    for rope in (False, True):
        model = _model(attention=attention, key_value_heads=key_value_heads, rope=rope)
        params = _params(model)
        off = _off(model, params, {name: _out_of(params[name], turn) for name in ("q", "k")})
        assert off > 1e-2 if rope else off < 1e-4, off
        assert _off(model, params, {"q": _out_of(params["q"], turn)}) > 1e-2


@pytest.mark.parametrize("attention", llama.ATTENTIONS)
@pytest.mark.parametrize("value_activation", ACTIVATIONS)
def test_values_may_change_basis_within_a_head_unless_a_nonlinearity_fixes_it(attention, value_activation):
    model, rng = _model(attention=attention, value_activation=value_activation), np.random.default_rng(8)
    params, turn = _params(model), frame(rng, BASE["head_dim"])
    shear = turn @ np.diag(np.linspace(0.5, 2, len(turn))) @ frame(rng, len(turn))
    for g_EE, free in ((turn, ("none", "radial")), (shear, ("none",))):
        off = _off(model, params, {"v": _out_of(params["v"], g_EE), "o": _into(params["o"], g_EE)})
        assert off < 1e-4 if value_activation in free else off > 1e-2, off


@jax.jit
def _first_order(q, k, v):
    """(d softmax attention of e q / d e at e = 0, what linear attention makes of it)."""
    softmax = jax.jvp(lambda q: jax.nn.dot_product_attention(q, k, v, is_causal=True), (0 * q,), (q,))[1]
    mean = jnp.cumsum(v, 1) / jnp.arange(1, v.shape[1] + 1, dtype="float32")[:, None, None]
    mean_a = llama.linear_attention(q, k, jnp.ones_like(v))
    return softmax, llama.linear_attention(q, k, v) - mean_a * jnp.repeat(mean, q.shape[2] // v.shape[2], axis=2)


@given(seed=st.integers(0, 2**32 - 1))
def test_linear_attention_is_softmax_to_first_order_in_the_scores_less_the_running_mean(seed):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 7, heads, 6)), jnp.float32) for heads in (4, 2, 2))
    np.testing.assert_allclose(*_first_order(q, k, v), atol=1e-5)


def test_linear_attention_adds_up_long_bfloat16_sequences_in_float32():
    ones = jnp.ones((1, 1000, 2, 16), jnp.bfloat16)  # a running sum in bfloat16 would stand still after 256 terms
    found = llama.linear_attention(ones, ones, ones)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), 4, rtol=2**-7)


@pytest.mark.parametrize("activation", ["silu", "none", "radial"])
def test_hidden_units_may_be_reordered_and_values_turned_within_a_head(activation):
    model = _model(activation=activation)
    params, rng = _params(model), np.random.default_rng(4)
    order = rng.permutation(BASE["mlp_width"])
    turn = frame(rng, BASE["head_dim"])
    changed = params | {"gate": params["gate"][:, :, order], "up": params["up"][:, :, order]}
    changed |= {"down": params["down"][:, order], "v": _out_of(params["v"], turn), "o": _into(params["o"], turn)}
    expected = _logits(model, params, _tokens())
    np.testing.assert_allclose(_logits(model, changed, _tokens()), expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    changed["o"] = params["o"]
    assert np.abs(_logits(model, changed, _tokens()) - expected).max() > 1e-2 * np.abs(expected).max()


def test_stacks_are_out_by_in():
    """A shared vector that every layer's projection listens to, planted in the kernels `x @ w`, is v1 and not u1."""
    model, rng = _model(), np.random.default_rng(5)
    params, planted = dict(_params(model, scale=0.01)), {}
    for name in llama.MATRICES:
        L, I, O = params[name].shape  # noqa: E741
        planted[name] = frame(rng, I)[0]
        written_LO = rng.standard_normal((L, O)) / np.sqrt(O)
        params[name] += jnp.asarray(np.einsum("I,LO->LIO", planted[name], written_LO), jnp.float32)
    stacks = model.stacks(params)
    assert tuple(stacks) == llama.MATRICES
    for name, vector in planted.items():
        u_LOK, _, vt_LKI = np.linalg.svd(np.asarray(stacks[name], np.float64), full_matrices=False)
        assert (np.abs(vt_LKI[:, 0] @ vector) > 0.95).all(), name
        assert (np.abs(np.einsum("LO,PO->LP", u_LOK[:, :, 0], u_LOK[:, :, 0])[np.triu_indices(3, 1)]) < 0.8).all(), name


def test_stacks_of_gradients_are_gradients_of_stacks():
    model = _model()
    params, tokens = _params(model), jnp.asarray(_tokens())
    rng, grads = np.random.default_rng(6), jax.jit(jax.grad(_loss(model)))(params, tokens)
    step = {name: rng.standard_normal(grads[name].shape) for name in llama.MATRICES}
    along = sum(float(np.sum(np.asarray(grads[name]) * step[name])) for name in llama.MATRICES)
    turned = sum(float(np.sum(np.asarray(g) * step[n].swapaxes(1, 2))) for n, g in model.stacks(grads).items())
    assert turned == pytest.approx(along, rel=1e-5)


@pytest.mark.parametrize("changes", [VARIANTS[i] for i in (1, 2, 4, 5, 9)], ids=str)
def test_the_steps_are_the_model_and_tell_what_each_projection_is_given(changes):
    """A kernel's gradient is a sum of (input, gradient of the output) over tokens: here of fewer than inputs have entries."""
    config, tokens = _config(**changes), jnp.asarray(_tokens(batch=1))
    model, steps = llama.build(config), llama.steps(config)
    params, probe = (
        _params(model, scale=0.15),
        np.random.default_rng(3).standard_normal((1, 9, config.width)).astype(np.float32),
    )
    h = steps.embed(params, tokens)
    for index in range(config.depth):
        layer = llama.of_layer(params, index)
        (after, given), pull = jax.vjp(lambda layer, h=h: steps.layer(layer, h), layer)
        (gradients,) = pull((jnp.asarray(probe), jax.tree.map(jnp.zeros_like, given)))
        for name in llama.MATRICES:
            x_NI = np.asarray(given[llama.INPUT_OF[name]])[0]
            basis_IN, _ = np.linalg.qr(x_NI.T)
            gradient_IO = np.asarray(gradients[name])
            outside = gradient_IO - basis_IN @ (basis_IN.T @ gradient_IO)
            assert np.linalg.norm(outside) < 1e-4 * np.linalg.norm(gradient_IO), name
            assert len(x_NI) < len(gradient_IO)
        h = after
    np.testing.assert_allclose(steps.read_out(params, h), _logits(model, params, tokens), rtol=1e-4, atol=1e-5)


def test_parameters_are_named_and_have_their_roles():
    full = _model(qkv_bias=True, qk_norm=True)
    shapes = {name: x.shape for name, x in jax.eval_shape(full.init, jax.random.key(0)).items()}
    L, D, F, Q, K = 3, 20, 28, 24, 12
    assert shapes == {
        "embedding": (31, D), "head": (D, 31), "final_norm": (D,),
        "q": (L, D, Q), "k": (L, D, K), "v": (L, D, K), "o": (L, Q, D),
        "gate": (L, D, F), "up": (L, D, F), "down": (L, F, D),
        "q_bias": (L, Q), "k_bias": (L, K), "v_bias": (L, K), "q_norm": (L, 6), "k_norm": (L, 6),
        "attention_norm": (L, D), "mlp_norm": (L, D),
    }  # fmt: skip
    assert set(full.roles) == set(shapes)
    assert {name for name, role in full.roles.items() if role == "matrix"} == set(llama.MATRICES)
    assert {name for name, role in full.roles.items() if role == "embedding"} == set(EMBEDDINGS)
    assert set(full.roles.values()) == {"matrix", "embedding", "vector"}
    bare = set(jax.eval_shape(_model(norm="none", tied=True).init, jax.random.key(0)))
    assert bare == {"embedding", *llama.MATRICES}


def test_attention_position_and_values_change_no_parameter():
    plain, initial = llama.parameters_per_part(_config()), BASE_INIT(_key(3))
    for changes in NEW:
        assert llama.parameters_per_part(_config(**changes)) == plain
    changed = jax.jit(_model(**NEW[-1]).init)(_key(3))
    for name, value in initial.items():
        np.testing.assert_array_equal(changed[name], value, err_msg=name)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_parameters_per_part_add_up_to_what_there_is(changes):
    parts = llama.parameters_per_part(_config(**changes))
    assert sum(count for part, count in parts.items() if part != "total") == parts["total"]
    assert parts["total"] == sum(value.size for value in _params(_model(**changes)).values())


def test_the_paper_s_model_has_33_7_million_parameters():
    sizes = {"vocabulary": 16384, "width": 512, "depth": 8, "heads": 8, "key_value_heads": 8, "head_dim": 64}
    parts = llama.parameters_per_part(_config(**sizes, mlp_width=1376, tied=True))
    assert parts == {
        "embedding": 16384 * 512, "attention": 8 * 4 * 512**2, "mlp": 8 * 3 * 512 * 1376, "norms": 17 * 512, "head": 0,
        "total": 33_694_208,
    }  # fmt: skip


def test_initial_weights_have_the_spread_that_the_config_names():
    std, depth = 0.03, 8
    sizes = {"width": 64, "head_dim": 32, "mlp_width": 96, "vocabulary": 300, "depth": depth}
    params = jax.jit(_model(init_std=std, qkv_bias=True, qk_norm=True, **sizes).init)(_key(0))
    for name, value in params.items():
        value = np.asarray(value, np.float64)
        if name in (*llama.MATRICES, *EMBEDDINGS):
            expected = std / math.sqrt(2 * depth) if name in ("o", "down") else std
            assert value.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * value.size)), name
            assert abs(value.mean()) < 4 * expected / math.sqrt(value.size), name
            assert np.mean(value**4) / expected**4 == pytest.approx(3, rel=0.25), f"{name} is normal"
        else:
            np.testing.assert_array_equal(value, 1 if name in GAINS else 0)


def test_a_seed_means_the_same_weights_in_every_variant_and_layers_draw_apart():
    plain, other = BASE_INIT(_key(3)), BASE_INIT(_key(4))
    changes = {"qkv_bias": True, "qk_norm": True, "norm": "none", "tied": True, "activation": "none"}
    params = jax.jit(_model(**changes).init)(_key(3))
    for name in ("embedding", *llama.MATRICES):
        np.testing.assert_array_equal(params[name], plain[name], err_msg=name)
        assert (np.asarray(plain[name]) != np.asarray(other[name])).all(), name
    for name in llama.MATRICES:
        assert (np.asarray(plain[name][0]) != np.asarray(plain[name][1])).all(), name


def test_the_initial_spread_may_be_traced_and_scales_what_is_drawn():
    def init(std):
        config = ConfigDict(_config().to_dict(), type_safe=False)
        config.init_std = std
        return llama.build(config).init(_key(5))

    traced, plain = jax.jit(init)(jnp.float32(5 * BASE["init_std"])), BASE_INIT(_key(5))
    for name, value in plain.items():
        np.testing.assert_allclose(traced[name], value if name in GAINS else 5 * value, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "sillu"}, "model.activation='sillu' does not exist; did you mean 'silu'"),
        ({"attention": "liner"}, "model.attention='liner' does not exist; did you mean 'linear'"),
        ({"value_activation": "elu"}, "model.value_activation='elu' does not exist; did you mean 'relu'"),
        ({"max_length": -1}, "model.max_length=-1 is negative; .* or 0 for no limit"),
        ({"norm": "batchnorm"}, "model.norm='batchnorm' does not exist; there are: rmsnorm, layernorm"),
        ({"dtype": "float16"}, "model.dtype='float16' does not exist"),
        ({"scaling": {"kind": "yarn"}}, "model.rope_scaling.kind='yarn' does not exist; there are: none, linear"),
        ({"key_value_heads": 3}, "model.heads=4 is no multiple of model.key_value_heads=3"),
        ({"head_dim": 5}, "model.head_dim=5 is odd"),
        ({"scaling": {"kind": "factors", "factors": (1.0, 2.0)}}, "has 2 entries; head_dim=6 needs 3"),
    ],
    ids=str,
)
def test_what_does_not_exist_or_fit_is_refused(changes, message):
    with pytest.raises(GcjaxError, match=message):
        _model(**changes)


def test_a_sequence_beyond_what_the_model_is_meant_for_is_refused_when_it_is_traced():
    model = _model(max_length=9)
    params = _params(model)
    assert _logits(model, params, _tokens(length=9)).shape == (2, 9, BASE["vocabulary"])
    for apply in (model.apply, jax.jit(model.apply), lambda *given: jax.eval_shape(model.apply, *given)):
        with pytest.raises(GcjaxError, match=r"sequence has 10 tokens; cut it to model.max_length=9, or raise it"):
            apply(params, jnp.asarray(_tokens(length=10)))
    assert jax.eval_shape(_model(max_length=0).apply, params, _tokens(length=5000)).shape[1] == 5000
