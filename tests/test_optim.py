"""Optimizers against their textbook form in float64, the roles of parameters, schedules, and a step's bookkeeping."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from gcjax import config as configs
from gcjax.errors import GcjaxError
from gcjax.models.mlp import ROLES
from gcjax.results import SOURCES
from gcjax.training import optim, problem, train

STUDY = str(Path(__file__).parents[1] / "configs" / "mlp_ablation.py")
TRACED = ("lr", "b1", "b2", "momentum", "weight_decay")
STEPS = 3


def _config(**changes):
    config = configs.load(STUDY).optim.to_dict() | {"lr": 0.1, "weight_decay": 0.01, "b2": 0.9} | changes
    return ConfigDict(config, type_safe=False)


def _tree(seed, layers=3, d=4):
    """Something of each role in the MLP's shapes: bias and stacked weight differ in ndim, not in layers."""
    rng = np.random.default_rng(seed)
    shapes = {"hidden": (layers, d, d), "input": (5, d), "readout": (d, 2), "hidden_bias": (layers, d)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def _run(config, params, gradients, steps=100):
    """Parameters after one step for each of `gradients`."""
    tx = optim.build(config, steps, ROLES)
    state = tx.init(params)
    for grads in gradients:
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def _adam(c, x, grads, decay=0.0, lr=None):
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * g**2
        step = m / (1 - c.b1**t) / (np.sqrt(v / (1 - c.b2**t)) + c.eps)
        x = x - (lr or c.lr) * (step + decay * x)
    return x


def _sgd(c, x, grads):
    for g in grads:
        x = x - c.lr * g
    return x


def _momentum(c, x, grads):
    m = 0.0
    for g in grads:
        m = c.momentum * m + g
        x = x - c.lr * (g + c.momentum * m if c.nesterov else m)
    return x


def _rmsprop(c, x, grads):
    v = 0.0
    for g in grads:
        v = c.b2 * v + (1 - c.b2) * g**2
        x = x - c.lr * g / np.sqrt(v + c.eps)
    return x


def _adamw(c, x, grads, name):
    return _adam(c, x, grads, decay=0.0 if ROLES[name] == "vector" else c.weight_decay)


TEXTBOOK = {
    "adam": lambda c, x, grads, name: _adam(c, x, grads),
    "adamw": _adamw,
    "sgd": lambda c, x, grads, name: _sgd(c, x, grads),
    "momentum": lambda c, x, grads, name: _momentum(c, x, grads),
    "rmsprop": lambda c, x, grads, name: _rmsprop(c, x, grads),
}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", TEXTBOOK)
def test_optimizers_are_their_textbook_form(name, nesterov):
    config, params = _config(name=name, nesterov=nesterov), _tree(0)
    gradients = [_tree(seed) for seed in range(1, STEPS + 1)]
    found = _run(config, params, gradients)
    for key, value in params.items():
        grads = [np.asarray(g[key], np.float64) for g in gradients]
        expected = TEXTBOOK[name](config, np.asarray(value, np.float64), grads, key)
        np.testing.assert_allclose(found[key], expected, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", [*TEXTBOOK, "muon"])
def test_hyperparameters_may_be_traced_and_batched(name):
    params, grads = _tree(0), _tree(1)

    @jax.jit
    def after(traced):
        return _run(_config(name=name, **traced), params, [grads, grads])

    low = {"lr": 0.1, "b1": 0.9, "b2": 0.99, "momentum": 0.9, "weight_decay": 0.01}
    high = {"lr": 0.3, "b1": 0.5, "b2": 0.9, "momentum": 0.5, "weight_decay": 0.1}
    both = {path: jnp.asarray([low[path], high[path]], jnp.float32) for path in TRACED}
    together = jax.vmap(after)(both)
    for i, one in enumerate((low, high)):
        alone = _run(_config(name=name, **one), params, [grads, grads])
        for key in params:
            np.testing.assert_allclose(together[key][i], alone[key], rtol=2e-4, atol=1e-5, err_msg=key)
    assert all((together[key][0] != together[key][1]).any() for key in params)


@pytest.mark.parametrize("name", [*TEXTBOOK, "muon"])
def test_every_optimizer_descends(name):
    params, tx = _tree(0), optim.build(_config(name=name, lr=0.01), 100, ROLES)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(lambda x: 2 * x, params), state, params)  # of the sum of squares
        return optax.apply_updates(params, updates), state

    found, state = params, tx.init(params)
    for _ in range(20):
        found, state = step(found, state)
    for key, value in params.items():
        assert jnp.sum(found[key] ** 2) < jnp.sum(value**2), key


@pytest.mark.parametrize(("layers", "d"), [(1, 6), (6, 6), (3, 6), (9, 6)])
def test_muon_orthogonalizes_every_layer_of_the_stack_by_itself(layers, d):
    params = _tree(0, layers, d)
    grads = _tree(1, layers, d)
    config = _config(name="muon", lr=0.5, weight_decay=0.0)
    run = jax.jit(partial(_run, config))
    moved = run(params, [grads])
    update = np.asarray(moved["hidden"] - params["hidden"], np.float64) / -config.lr
    u_LDD, _, vt_LDD = np.linalg.svd(np.asarray(grads["hidden"], np.float64))
    # Five Newton-Schulz steps bring every singular value near 1 and leave the frames alone.
    singular = np.linalg.svd(update)[1]
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    inside = u_LDD.swapaxes(1, 2) @ update @ vt_LDD.swapaxes(1, 2)
    diagonal = np.einsum("lii->li", inside)
    np.testing.assert_allclose(np.sort(diagonal), np.sort(singular), atol=2e-2)
    np.testing.assert_allclose(inside - diagonal[..., None] * np.eye(d), 0, atol=2e-2)
    backwards = run(params, [grads | {"hidden": grads["hidden"][::-1]}])
    np.testing.assert_allclose((backwards["hidden"] - params["hidden"])[::-1], moved["hidden"] - params["hidden"], atol=1e-6)


def test_muon_gives_embeddings_and_vectors_to_adam_at_their_own_rate():
    config, params = _config(name="muon", muon_adam_ratio=0.25), _tree(0)
    gradients = [_tree(seed) for seed in range(1, STEPS + 1)]
    found = _run(config, params, gradients)
    for key in ("input", "readout", "hidden_bias"):
        grads = [np.asarray(g[key], np.float64) for g in gradients]
        decay = 0.0 if ROLES[key] == "vector" else config.weight_decay
        expected = _adam(config, np.asarray(params[key], np.float64), grads, decay, lr=config.lr * 0.25)
        np.testing.assert_allclose(found[key], expected, rtol=1e-4, atol=1e-5, err_msg=key)


def test_muon_follows_the_config_s_nesterov():
    """On the second step: the direction is momentum * m + (1 - momentum) * g with it, m without."""
    params, gradients = _tree(0), [_tree(1), _tree(2)]
    plain, nesterov = (_run(_config(name="muon", nesterov=on), params, gradients) for on in (False, True))
    assert np.abs(plain["hidden"] - nesterov["hidden"]).max() > 1e-3
    np.testing.assert_array_equal(plain["input"], nesterov["input"])


@pytest.mark.parametrize(("name", "matrix", "embedding"), [("adamw", 0.1, 0.1), ("muon", 0.1, 0.05)])
def test_weight_decay_spares_the_vectors(name, matrix, embedding):
    params = _tree(0)
    nothing = jax.tree.map(jnp.zeros_like, params)
    found = _run(_config(name=name, lr=1.0, weight_decay=0.1), params, [nothing])
    np.testing.assert_allclose(found["hidden"], params["hidden"] * (1 - matrix), rtol=1e-5)
    for key in ("input", "readout"):
        np.testing.assert_allclose(found[key], params[key] * (1 - embedding), rtol=1e-5)
    np.testing.assert_array_equal(found["hidden_bias"], params["hidden_bias"])


def test_adam_without_averages_is_sign_descent():
    config, params = _config(name="adam", b1=0.0, b2=0.0, lr=0.01), _tree(0)
    gradients = [_tree(seed) for seed in range(1, 6)]
    gradients[2] = jax.tree.map(lambda g: g.at[0].set(0.0), gradients[2])  # nothing to divide by
    found = _run(config, params, gradients)
    for key, value in params.items():
        signs = sum(np.sign(np.asarray(g[key], np.float64)) for g in gradients)
        np.testing.assert_allclose(found[key], value - 0.01 * signs, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("size", [0.01, 100.0])
def test_clipping_bounds_the_norm_over_all_parameters_and_turns_nothing(size):
    params, grads = _tree(0), jax.tree.map(lambda g: size * g, _tree(1))
    norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in grads.values()))
    found = _run(_config(name="sgd", lr=1.0, clip_norm=1.0), params, [grads])
    for key in params:
        expected = np.asarray(grads[key]) / max(norm, 1.0)
        np.testing.assert_allclose(params[key] - found[key], expected, atol=1e-5, err_msg=key)


def _rates(steps, counts, **changes):
    rate = optim.schedule(_config(**changes), steps)
    return [float(rate(jnp.int32(count))) for count in counts]


def test_a_constant_schedule_is_constant():
    np.testing.assert_allclose(_rates(100, (0, 50, 100, 200), schedule="constant", warmup=0), 0.1)


def test_warmup_rises_linearly_from_nothing_and_then_leaves_the_rate():
    np.testing.assert_allclose(_rates(100, (0, 5, 10, 11, 100), schedule="constant", warmup=10), [0, 0.05, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("warmup", [0, 20])
def test_cosine_falls_over_the_steps_after_the_warmup_to_its_final_fraction(warmup):
    middle = (warmup + 100) // 2
    found = _rates(100, (warmup, middle, 100, 500), schedule="cosine", warmup=warmup, final_fraction=0.2)
    np.testing.assert_allclose(found, [0.1, 0.06, 0.02, 0.02], rtol=1e-5)
    every = _rates(100, range(warmup, 101), schedule="cosine", warmup=warmup, final_fraction=0.2)
    assert (np.diff(every) < 0).all()
    if warmup:
        np.testing.assert_allclose(_rates(100, (0, 10), schedule="cosine", warmup=warmup), [0, 0.05], rtol=1e-5)


def test_the_schedule_is_followed_step_by_step():
    params, grads = _tree(0), jax.tree.map(jnp.ones_like, _tree(0))
    config = _config(name="sgd", schedule="cosine", warmup=2)
    found = _run(config, params, [grads] * 6, steps=6)
    total = sum(_rates(6, range(6), schedule="cosine", warmup=2))
    np.testing.assert_allclose(params["input"] - found["input"], total, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "adamm"}, "optim.name='adamm' does not exist; did you mean 'adam"),
        (
            {"name": "shampoo"},
            "optim.name='shampoo' does not exist; there are: adam, adamw, sgd, momentum, rmsprop, muon",
        ),
        ({"schedule": "cosin"}, "optim.schedule='cosin' does not exist; did you mean 'cosine'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(changes, message):
    with pytest.raises(GcjaxError, match=message):
        optim.build(_config(**changes), 10, ROLES)


def _tiny(optimizer, **changes):
    """A problem of three layers of eight on made-up images, and its optimizer."""
    config = configs.load(STUDY).unlock()
    config.model.update({"depth": 3, "width": 8, "init_gain": 0.5, "bias": True})
    config.train.batch_size = 4
    config.optim.update({"name": optimizer} | changes)
    made = problem.build(config)
    rng = np.random.default_rng(0)
    data = {
        "train_x": jnp.asarray(rng.integers(0, 256, (20, 784)), jnp.uint8),
        "train_y": jnp.asarray(rng.integers(0, 10, 20), jnp.int32),
        "test_x": jnp.asarray(rng.integers(0, 256, (6, 784)), jnp.uint8),
        "test_y": jnp.asarray(rng.integers(0, 10, 6), jnp.int32),
    }
    return made, optim.build(config.optim, 100, made.roles), data


def _trained(made, tx, data, steps, seed=0):
    """The states before and after, and what a bystander adds up: raw gradients of the same batches, losses."""
    state = first = train.init(made, tx, jnp.uint32(seed))
    grad = jax.jit(jax.value_and_grad(made.loss))
    step = jax.jit(partial(train.step, made, tx, of_batch=partial(train.gradients, made)))
    total, losses = 0.0, []
    for count in range(steps):
        loss, grads = grad(state.params, made.batch(data, first.key, jnp.int32(count)))
        total = total + np.asarray(grads["hidden"], np.float64)
        state, told = step(data, state)
        losses.append((float(loss), float(told)))
    return first, state, total, losses


@pytest.mark.parametrize(("optimizer", "changes"), [("sgd", {}), ("adam", {}), ("sgd", {"clip_norm": 0.01}), ("muon", {})])
def test_the_cumulative_gradient_sums_raw_gradients_before_the_optimizer_touches_them(optimizer, changes):
    first, last, total, losses = _trained(*_tiny(optimizer, lr=0.05, **changes), steps=8)
    assert set(last.cumulative) == {"hidden"}
    np.testing.assert_array_equal(first.cumulative["hidden"], 0)
    np.testing.assert_allclose(last.cumulative["hidden"], total, rtol=1e-4, atol=1e-5 * np.abs(total).max())
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-5)
    assert int(last.step) == 8
    assert last.cumulative["hidden"].dtype == jnp.float32
    if optimizer == "adam":  # which does not follow it, so the two cannot be mistaken for each other
        moved = np.asarray(last.params["hidden"] - first.params["hidden"]).ravel()
        assert abs(moved @ total.ravel()) / np.linalg.norm(moved) / np.linalg.norm(total) < 0.98


def test_with_plain_sgd_the_update_is_the_cumulative_gradient_times_the_learning_rate():
    made, tx, data = _tiny("sgd", lr=0.05)
    first, last, _, _ = _trained(made, tx, data, steps=30)
    moved = np.asarray(last.params["hidden"], np.float64) - np.asarray(first.params["hidden"])
    np.testing.assert_allclose(moved, -0.05 * np.asarray(last.cumulative["hidden"]), atol=1e-5 * np.abs(moved).max() + 3e-7)
    assert np.abs(moved).max() > 1e-3

    found = jax.jit(partial(train.snapshot, made, rank=4, solver="svd"))(
        data, last, made.stacks(first.params), whole=np.bool_(True)
    )
    update, cumulative = SOURCES.index("update"), SOURCES.index("cumulative_gradient")
    for name in ("cosine", "overlap", "gram_alignment", "sigma2_alignment", "layer_cosine"):
        value = np.asarray(found[f"hidden/{name}"])
        np.testing.assert_allclose(value[update], value[cumulative], atol=1e-2, err_msg=name)
    np.testing.assert_allclose(found["hidden/norm"][update], 0.05 * found["hidden/norm"][cumulative], rtol=1e-3)


def test_batches_and_initial_weights_depend_on_the_seed_and_nothing_else():
    made, tx, data = _tiny("sgd")
    other, tx_other, _ = _tiny("adam", lr=0.3)
    one, two = train.init(made, tx, jnp.uint32(3)), train.init(other, tx_other, jnp.uint32(3))
    np.testing.assert_array_equal(one.params["hidden"], two.params["hidden"])
    for count in (0, 1, 7):
        for a, b in zip(made.batch(data, one.key, jnp.int32(count)), other.batch(data, two.key, jnp.int32(count))):
            np.testing.assert_array_equal(a, b)
    stranger = train.init(made, tx, jnp.uint32(4))
    assert (stranger.params["hidden"] != one.params["hidden"]).all()
    images = [np.asarray(made.batch(data, s.key, jnp.int32(c))[0]) for s, c in ((one, 0), (one, 1), (stranger, 0))]
    assert (images[0] != images[1]).any()
    assert (images[0] != images[2]).any()
