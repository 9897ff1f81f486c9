"""Language-model studies: windows of a corpus, host and device, microbatches, meshes, resume, and transformers as the judge."""

import json
import math
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from toys import LLAMA, TOY_LLAMA, run_on_four, write_prose

from gcjax import config as configs
from gcjax import results
from gcjax.data import text
from gcjax.errors import GcjaxError, Stopped
from gcjax.training import executor, feed, language, optim, problem, study, sweep, throughput, train

MATRICES = ["q", "k", "v", "o", "gate", "up", "down"]
Toy = Callable[..., configs.ConfigDict]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory):
    """Overrides -> the study at toy size, on PROSE."""
    folder = tmp_path_factory.mktemp("prose")
    prose = write_prose(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCJAX_CACHE", str(folder / "cache"))
        yield lambda *overrides: configs.load(LLAMA, (*TOY_LLAMA, f"data.files={prose}", *overrides))


@pytest.fixture(scope="module")
def trained(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> xr.Dataset:
    return study.train(toy("seeds=2"), tmp_path_factory.mktemp("study") / "toy")


def _parts(config, seed=0):
    """(the run's config, its problem, its data as NumPy arrays, its parameters before the first step)."""
    own = sweep.runs(config)[0].config
    built = problem.build(own)
    return own, built, problem.load_data(own)[0], built.init(jax.random.key(seed))


# End to end


def test_a_study_of_a_transformer_follows_the_schema_and_learns(trained: xr.Dataset) -> None:
    assert trained.matrix.values.tolist() == MATRICES
    assert trained.step.values.tolist() == [0, 3, 12, 24]
    assert trained.full_step.values.tolist() == [0, 24]
    assert set(trained.status.values.tolist()) == {"finished"}
    assert trained.cosine.sizes["pair"] == 1
    for name in ("loss", "loss_max", "test_loss", "test_accuracy", "update_ratio", "drift", "cosine_null"):
        assert bool(np.isfinite(trained[name]).all()), name
    for name in ("cosine", "overlap", "sigma", "gap", "transfer"):
        assert bool(np.isfinite(trained[name].isel(step=-1)).all()), name  # an update of zero has no direction
    assert bool(((trained.cosine.isel(step=-1) >= 0) & (trained.cosine.isel(step=-1) <= 1 + 1e-5)).all())
    assert bool((trained.test_loss.isel(step=-1) < trained.test_loss.isel(step=0)).all())
    # 24 x 16 against 16 x 24: input and output space are those of the matrix, not of its kernel.
    null = trained.cosine_null.sel(matrix=["gate", "down"])
    assert null.sel(matrix="gate", space="input").item() == null.sel(matrix="down", space="output").item()
    assert null.sel(matrix="gate", space="input") > null.sel(matrix="gate", space="output")


def test_a_study_s_results_say_what_it_read_and_how_fast_it_went(trained: xr.Dataset) -> None:
    data = json.loads(trained.attrs["data"])
    assert (data["name"], data["train_documents"], data["valid_documents"]) == ("files", 5, 2)
    assert len(data["sha256"]) == 64
    speed = json.loads(trained.attrs["throughput"])
    assert speed["steps_per_second"] > 0
    assert speed["tokens_per_second"] == pytest.approx(speed["steps_per_second"] * 4 * 16)
    per_layer = 4 * 16 * 16 + 3 * 16 * 24
    assert speed["flops_per_token"] == 6 * (2 * per_layer + 300 * 16) + 6 * 2 * 16 * 16
    assert speed["model_flops_utilisation"] is None


def _history(config, directory: Path, compiled: dict, stop_at: int | None = None) -> dict[str, np.ndarray] | None:
    """Train the config's only pack in this process, or up to a checkpoint at `stop_at`; `compiled` keeps its programs."""
    (pack,) = sweep.packs(sweep.runs(config), 1)
    arrays, stop = problem.load_data(sweep.runs(config)[0].config)[0], threading.Event()

    def report(_, steps: int) -> None:
        if stop_at is not None and steps >= stop_at:
            stop.set()

    def programs(*args):
        return compiled.setdefault(pack.static, train.programs(*args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "programs", programs)
        try:
            executor.train_queue([pack], config, arrays, executor.groups(config)[0], directory, report, stop)
        except Stopped:
            return None
    return executor.checkpoint.history(directory / pack.name)


@pytest.fixture(scope="module")
def histories(toy: Toy, tmp_path_factory: pytest.TempPathFactory):
    """(where the corpus is, whether stopped on the way) -> history; and the programs that trained each."""
    found, made = {}, {"device": {}, "host": {}}
    for place, compiled in made.items():
        config = toy() if place == "device" else toy("data.device_bytes=0")
        found[place, False] = _history(config, tmp_path_factory.mktemp("whole"), compiled)
        directory = tmp_path_factory.mktemp("parts")
        for stop_at in (3, 18):  # the second time with all steps done, but the run not ended
            assert _history(config, directory, compiled, stop_at) is None, "it ended before it could be stopped"
        found[place, True] = _history(config, directory, compiled)
    return found, {place: next(iter(compiled.values())) for place, compiled in made.items()}


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("stopped", [False, True])
def test_stopped_or_not_and_from_host_or_device_a_run_has_the_same_bits(histories, place, stopped) -> None:
    expected, found = histories[0]["device", False], histories[0][place, stopped]
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"chunk/seconds"}:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("place", ["device", "host"])
def test_every_chunk_and_snapshot_of_a_run_shares_a_program(histories, place) -> None:
    programs = histories[1][place]
    assert programs.chunk._cache_size() == 1
    assert programs.snapshot._cache_size() == 1


# Windows


def test_batches_follow_from_the_key_and_the_step_alone(toy: Toy) -> None:
    config, built, arrays, _ = _parts(toy())
    draw, place = jax.jit(built.batch), jax.jit(lambda key, step: language.starts(config, key, step, len(arrays["train"])))
    data, keys = jax.device_put(arrays), [jax.random.key(seed) for seed in (0, 1)]
    drawn = {(k, step): np.asarray(draw(data, keys[k], np.int32(step))) for step in (5, 0, 1) for k in (0, 1)}
    for (k, step), batch in drawn.items():
        assert batch.shape == (4, 17)
        np.testing.assert_array_equal(batch, draw(data, keys[k], np.int32(step)))
        starts_B = np.asarray(place(keys[k], np.int32(step)))
        np.testing.assert_array_equal(batch, [arrays["train"][start : start + 17] for start in starts_B])
    assert len({batch.tobytes() for batch in drawn.values()}) == len(drawn)


def test_every_window_of_the_corpus_is_drawn_and_none_beyond_it(toy: Toy) -> None:
    config, *_ = _parts(toy("train.batch_size=400"))
    starts = np.concatenate([language.starts(config, jax.random.key(0), jnp.int32(step), 30) for step in range(3)])
    assert np.unique(starts).tolist() == list(range(30 - 16))


def test_validation_windows_spread_over_the_split_and_do_not_overlap(toy: Toy) -> None:
    config = sweep.runs(toy())[0].config
    valid_T = text.load("files", config.data.files, 300, 0.3).valid_T
    for wanted in (1, 9, 10**6):
        config.measure.valid_windows = wanted
        windows = problem.load_data(config)[0]["valid"]
        assert windows.shape == (min(wanted, (len(valid_T) - 1) // 16), 17)
        lined = np.lib.stride_tricks.sliding_window_view(valid_T, 17)
        places = [np.flatnonzero((lined == window).all(axis=1)) for window in windows]
        assert all(len(place) for place in places)
        starts = [int(place[0]) for place in places]
        assert starts[0] == 0
        assert len(windows) == 1 or starts[-1] == len(valid_T) - 17
        assert (np.diff(starts) >= 16).all()


INTERVALS = [(0, 0), (0, 3), (3, 6), (6, 12), (12, 13)]


def test_the_host_gathers_each_interval_once_in_order_with_the_last_step_s_batch(toy: Toy, monkeypatch) -> None:
    config, built, arrays, _ = _parts(toy("data.device_bytes=0"))
    static, where, key = sweep.static(config), jax.devices()[0], train.keys(7)[1]
    placed = feed.place(config, arrays, where)
    assert placed["train"] is arrays["train"], "a large corpus is not copied"
    gathered, gather = [], language.gather

    def spy(tokens_T, starts_B, window):
        gathered.append(starts_B)
        return gather(tokens_T, starts_B, window)

    monkeypatch.setattr(language, "gather", spy)
    fed = list(feed.feed(static, placed, 7, INTERVALS, where))
    monkeypatch.undo()
    assert len(fed) == len(gathered) == len(INTERVALS)
    whole, draw, corpus = jax.device_put(arrays), jax.jit(built.batch), len(arrays["train"])
    place = jax.jit(lambda step: language.starts(config, key, step, corpus))
    for (first, last), own, starts_SB in zip(INTERVALS, fed, gathered, strict=True):
        assert "train" not in own
        np.testing.assert_array_equal(own["valid"], arrays["valid"])
        for step in range(first, last + 1):
            np.testing.assert_array_equal(starts_SB[step - first], place(np.int32(step)))
            np.testing.assert_array_equal(draw(own, key, np.int32(step)), draw(whole, key, np.int32(step)))


def test_a_corpus_on_the_device_is_fed_as_it_is(toy: Toy) -> None:
    config, _, arrays, _ = _parts(toy())
    placed = feed.place(config, arrays, jax.devices()[0])
    assert all(isinstance(value, jax.Array) for value in placed.values())
    fed = list(feed.feed(sweep.static(config), placed, 0, INTERVALS, jax.devices()[0]))
    assert len(fed) == len(INTERVALS)
    assert all(own is placed for own in fed)


def test_a_feed_that_fails_says_so_and_one_that_is_left_ends_its_thread(toy: Toy, monkeypatch) -> None:
    config, _, arrays, _ = _parts(toy("data.device_bytes=0"))
    args = sweep.static(config), arrays, 0, INTERVALS, jax.devices()[0]
    before = threading.active_count()
    left = feed.feed(*args)
    next(left)
    left.close()
    assert threading.active_count() == before
    monkeypatch.setattr(language, "gather", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(OSError, match="the disk is gone"):
        list(feed.feed(*args))


# Gradients and losses


@pytest.mark.parametrize("parts", [2, 4])
def test_microbatches_have_the_gradient_of_the_batch(toy: Toy, parts: int) -> None:
    _, whole, arrays, params = _parts(toy())
    _, split, *_ = _parts(toy(f"train.microbatches={parts}"))
    batch = whole.batch(jax.device_put(arrays), jax.random.key(3), jnp.int32(0))
    (loss, grads), (loss_again, grads_again) = (
        jax.jit(lambda params, batch, each=each: train.gradients(each, params, batch))(params, batch) for each in (whole, split)
    )
    assert loss_again == pytest.approx(float(loss), rel=1e-6)
    for name, value in grads.items():
        np.testing.assert_allclose(grads_again[name], value, rtol=0, atol=1e-6 * float(jnp.abs(value).max()), err_msg=name)


def _loss(params, windows_BT, config) -> tuple[float, float]:
    """Cross-entropy and accuracy of the decoder in float64, written down from the papers: pre-norm, RoPE, SwiGLU, tied head."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    H, E, T = config.model.heads, config.model.head_dim, windows_BT.shape[1] - 1
    turn_TW = np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, E, 2) / E)
    cos_TW, sin_TW = np.cos(turn_TW), np.sin(turn_TW)

    def normed(x, gain):
        return gain * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.model.norm_eps)

    def rotated(x_HTE):
        a, b = np.split(x_HTE, 2, axis=-1)
        return np.concatenate([a * cos_TW - b * sin_TW, b * cos_TW + a * sin_TW], axis=-1)

    losses, right = [], []
    for window_T in windows_BT.astype(int):
        h = p["embedding"][window_T[:-1]]
        for layer in range(config.model.depth):
            w = {name: value[layer] for name, value in p.items() if name not in ("embedding", "final_norm")}
            x = normed(h, w["attention_norm"])
            q, k, v = ((x @ w[name]).reshape(T, H, E).swapaxes(0, 1) for name in "qkv")
            scores = rotated(q) @ rotated(k).swapaxes(1, 2) / math.sqrt(E)
            weights = np.exp(scores) * np.tril(np.ones((T, T)))
            y = weights / weights.sum(axis=-1, keepdims=True) @ v
            h = h + y.swapaxes(0, 1).reshape(T, H * E) @ w["o"]
            x = normed(h, w["mlp_norm"])
            gate = x @ w["gate"]
            h = h + (gate / (1 + np.exp(-gate)) * (x @ w["up"])) @ w["down"]
        logits = normed(h, p["final_norm"]) @ p["embedding"].T
        losses.append(np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(T), window_T[1:]])
        right.append(logits.argmax(axis=-1) == window_T[1:])
    return float(np.mean(losses)), float(np.mean(right))


@pytest.mark.parametrize("windows", [3, 4, 9])  # fewer than a batch, one, and more that leave a remainder
def test_the_validation_loss_is_that_of_the_windows_in_float64(toy: Toy, windows: int) -> None:
    config, built, arrays, params = _parts(toy(f"measure.valid_windows={windows}", "model.init_std=0.3"))
    assert len(arrays["valid"]) == windows
    found = jax.jit(built.evaluate)(params, jax.device_put(arrays))
    loss, accuracy = _loss(params, arrays["valid"], config)
    assert float(found["test_loss"]) == pytest.approx(loss, rel=2e-6)
    assert float(found["test_accuracy"]) == pytest.approx(accuracy, abs=1e-6)


def test_a_model_that_has_not_learned_is_as_perplexed_as_its_vocabulary_is_large(trained: xr.Dataset) -> None:
    perplexity = np.exp(trained.test_loss.sel(step=0))
    assert bool((np.abs(perplexity / 300 - 1) < 0.05).all())


def test_twenty_steps_are_those_of_transformers_under_torch(toy: Toy) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    clip, steps, warmup, lr = 0.5, 20, 4, 3e-3
    config, built, arrays, params = _parts(
        toy(f"optim.clip_norm={clip}", f"optim.lr={lr}", f"train.steps={steps}", "optim.weight_decay=0.3", "model.init_std=0.1")
    )
    twin = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=64,
            attn_implementation="eager",
        )
    )  # fmt: skip
    names = {f"self_attn.{name}_proj": name for name in "qkvo"} | {f"mlp.{name}_proj": name for name in MATRICES[4:]}
    names |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    theirs = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["final_norm"]}
    for layer in range(2):
        for name, own in names.items():
            theirs[f"model.layers.{layer}.{name}.weight"] = params[own][layer].T
    with torch.no_grad():
        for name, value in twin.named_parameters():
            value.copy_(torch.from_numpy(np.array(theirs.pop(name))))
    assert not theirs

    vectors = [value for name, value in twin.named_parameters() if name.endswith("norm.weight")]
    others = [value for name, value in twin.named_parameters() if not name.endswith("norm.weight")]
    groups = [{"params": others, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    tx = optim.build(config.optim, steps, built.roles)
    step = jax.jit(lambda data, state: train.step(built, tx, data, state, partial(train.gradients, built)))
    matrices = {name: jnp.zeros_like(value) for name, value in params.items() if built.roles[name] == "matrix"}
    state = train.State(params, tx.init(params), matrices, jax.random.key(1), jnp.int32(0))
    data, norms = jax.device_put(arrays), []
    for i in range(steps):
        tokens = torch.from_numpy(np.array(built.batch(data, state.key, state.step)).astype(np.int64))
        logits = twin(tokens[:, :-1]).logits
        expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 300), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        expected.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)))
        cosine = 0.5 * (1 + math.cos(math.pi * (i - warmup) / (steps - warmup)))
        rate = lr * (i / warmup if i < warmup else 0.1 + 0.9 * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        state, loss = step(data, state)
        assert float(loss) == pytest.approx(expected.item(), abs=1e-4), f"step {i}"
    assert max(norms) > clip, "nothing was clipped"
    for name, own in names.items():
        found = dict(twin.named_parameters())[f"model.layers.1.{name}.weight"].detach().numpy()
        np.testing.assert_allclose(state.params[own][1].T, found, rtol=0, atol=1e-3, err_msg=own)
    moved = max(float(jnp.abs(state.params[name] - params[name]).max()) for name in MATRICES)
    assert moved > 0.02, "there was nothing to compare"


# Several devices: in a process of its own, whose CPU poses as four

SHARED = {
    "one": (),
    "four": ("executor.data_devices=4",),
    "fsdp": ("executor.data_devices=4", "executor.fsdp=True"),
    "four, from the host": ("executor.data_devices=4", "data.device_bytes=0"),
    "two, microbatches": ("executor.data_devices=2", "train.microbatches=2"),
    "two runs": ("seeds=2",),
    "two runs on two": ("seeds=2", "executor.run_devices=2"),
    "two runs and a filler on two by two": ("seeds=3", "executor.run_devices=2", "executor.data_devices=2"),
    "two by two, fsdp": ("seeds=2", "executor.run_devices=2", "executor.data_devices=2", "executor.fsdp=True"),
}
STEPS = 5


def _train_shared(out: Path, *overrides: str) -> None:
    """The subprocess: STEPS steps for each of SHARED; losses, parameters and shapes of shards go to `out`."""
    found, compilations = {}, []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compilations.append(event))
    for name, own in SHARED.items():
        config = configs.load(LLAMA, (*overrides, *own))
        (pack,) = sweep.packs(sweep.runs(config), config.seeds)
        devices = executor.groups(config)[0]
        where, width = executor.placement(devices), executor.padded(len(pack.runs), devices)
        compiled = train.programs(pack.static, width, where, config.executor.fsdp)
        traced = {path: jax.device_put(np.resize(np.asarray(values, np.float32), width), compiled.runs)
                  for path, values in pack.traced().items()}  # fmt: skip
        state, _ = compiled.init(jax.device_put(np.arange(width, dtype=np.uint32), compiled.runs), traced)
        data = feed.place(config, problem.load_data(pack.runs[0].config)[0], where)
        intervals, losses = [(i, i + 1) for i in range(STEPS)], []
        for own in feed.feed(pack.static, data, 0, intervals, where):
            state, metrics = compiled.chunk(state, traced, own, np.int32(1))
            losses.append(np.asarray(metrics["loss"]).tolist())
            if len(losses) == 1:
                compilations.clear()
        leaves = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 2]
        found[name] = {
            "losses": losses,
            "params": {key: np.asarray(value).tolist() for key, value in state.params.items()},
            "shards": {key: value.addressable_shards[0].data.shape for key, value in state.params.items()},
            "moments": [[x.shape, x.addressable_shards[0].data.shape] for x in leaves],
            "compiled again": [event for event in compilations if "backend_compile" in event],
        }
    out.write_text(json.dumps(found))


def _overrides(config) -> list[str]:
    return [*TOY_LLAMA, f"data.files={config.data.files[0]}"]


@pytest.fixture(scope="module")
def shared(toy: Toy, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("shared") / "found.json"
    run_on_four([__file__, "steps", str(out), *_overrides(toy())])
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", [name for name in SHARED if name not in ("one", "two runs")])
def test_devices_that_share_runs_and_batches_train_as_one_does(shared, name: str) -> None:
    alone, found = shared["two runs" if "seeds" in str(SHARED[name]) else "one"], shared[name]
    runs = len(alone["losses"][0])
    np.testing.assert_allclose([step[:runs] for step in found["losses"]], alone["losses"], rtol=0, atol=1e-5)
    for key, value in alone["params"].items():
        np.testing.assert_allclose(found["params"][key][:runs], value, rtol=0, atol=1e-5, err_msg=key)
    assert found["compiled again"] == []


def test_fsdp_shards_parameters_and_moments_and_plain_data_parallelism_does_not(shared) -> None:
    expected = {"embedding": [1, 75, 16], "final_norm": [1, 16], "attention_norm": [1, 2, 4], "mlp_norm": [1, 2, 4],
                "gate": [1, 2, 16, 6], "up": [1, 2, 16, 6], "down": [1, 2, 6, 16]}  # fmt: skip
    expected |= {key: [1, 2, 4, 16] for key in "qkvo"}
    shapes = shared["fsdp"]["shards"]
    assert shapes == expected
    assert shared["fsdp"]["moments"]
    assert all(math.prod(whole) == 4 * math.prod(shard) for whole, shard in shared["fsdp"]["moments"])
    assert all(math.prod(whole) == math.prod(shard) for whole, shard in shared["four"]["moments"])


TWO_BY_TWO = ("executor.run_devices=2", "executor.data_devices=2", "executor.vmap_width=2")


@pytest.mark.parametrize("shared_by", [("executor.data_devices=4", "executor.fsdp=True"), TWO_BY_TWO])
def test_a_study_whose_runs_are_shared_by_four_devices_ends_as_alone(
    toy: Toy, trained: xr.Dataset, tmp_path: Path, shared_by: tuple[str, ...]
) -> None:
    overrides = [*_overrides(toy()), "seeds=2", *shared_by]
    run_on_four([__file__, "study", str(tmp_path / "w"), *overrides])
    found = results.load(tmp_path / "w" / "results.nc")
    assert set(found.status.values.tolist()) == {"finished"}
    for name in ("test_loss", "loss"):
        np.testing.assert_allclose(found[name], trained[name], rtol=0, atol=1e-3)
    first = {"step": 0, "source": "weight"}
    np.testing.assert_allclose(found.sigma.sel(first), trained.sigma.sel(first), rtol=1e-4)


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.window=5000",), "a window of 5000 tokens needs 5001, but the training split of files has"),
        (("train.window=900",), "a window of 900 tokens needs 901, but the validation split of files has"),
        (("data.vocabulary=65537",), r"data\.vocabulary is 65537; it must be within 257 .* and 65536 \(uint16\)"),
        (("model.max_length=15",), r"train\.window=16 .*model\.max_length=15"),
        (("executor.data_devices=3",), r"train\.batch_size=4 cannot be divided .* on executor\.data_devices=3"),
        (("train.microbatches=3",), r"train\.batch_size=4 cannot be divided into train\.microbatches=3 equal parts"),
        (("executor.data_devices=4",), r"executor\.data_devices=4, but there are 1 cpu devices here"),
        (("measure.rank=17",), r"measure\.rank: rank 17 is outside 1\.\.16, the ranks of a 16 x 24 matrix, as \w+'s are"),
        (("model.kind=lama",), r"model\.kind='lama' does not exist; did you mean 'llama'"),
        (("data.device_bytes=0", "executor.vmap_width=2"), r"one run at a time: set executor\.vmap_width=1"),
        (("train.window=0",), r"train\.window=0 is too small"),
        (("train.microbatches=0",), r"train\.microbatches=0 is too small"),
        (("measure.valid_windows=0",), r"measure\.valid_windows=0 is too small"),
        (("model.attention=softmx",), r"model\.attention='softmx' does not exist; did you mean 'softmax'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(toy: Toy, overrides, message, tmp_path: Path) -> None:
    with pytest.raises(GcjaxError, match=message) as caught:
        study.train(toy(*overrides), tmp_path / "w")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "w").exists()


def test_an_empty_text_is_refused(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(GcjaxError, match=r"empty"):
        study.train(toy(f"data.files={tmp_path / 'empty.txt'}"), tmp_path / "w")
    assert not (tmp_path / "w").exists()


# Throughput


@pytest.mark.parametrize("window", [16, 256])
def test_flops_per_token_are_those_that_the_compiler_counts(toy: Toy, window: int) -> None:
    """At depth 1, as the compiler counts the body of a scan once; it computes all of the attention, twice the causal half."""
    sizes = ("model.width=128", "model.heads=4", "model.key_value_heads=4", "model.head_dim=32", "model.mlp_width=344")
    config = sweep.runs(toy(*sizes, "model.depth=2", f"train.window={window}"))[0].config
    config.model.depth = 1
    built = problem.build(config)
    params = jax.eval_shape(built.init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((4, window + 1), jnp.uint16)
    cost = jax.jit(lambda p, b: train.gradients(built, p, b)).lower(params, batch).compile().cost_analysis()
    causal_half = 6 * config.model.heads * config.model.head_dim * window
    expected = language.flops_per_token(config) + causal_half
    print(cost["flops"] / (4 * window) / expected)
    assert cost["flops"] / (4 * window) == pytest.approx(expected, rel=0.3)


def _of_runs(monkeypatch, config, kind: str = "cpu", seconds=None, ends=(0, 10, 20, 30, 40, 50, 60), snapshots=(0, 60)):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind=kind)])
    seconds = np.full((2, len(ends)), 2.0) if seconds is None else seconds
    return throughput.of_runs(sweep.runs(config), 1, seconds, ends, snapshots)


def test_throughput_counts_neither_compilation_nor_snapshots(toy: Toy, monkeypatch) -> None:
    seconds = np.tile([90.0, 80.0, 2.0, 2.0, 2.5, 2.0, 50.0], (2, 1))
    found = _of_runs(monkeypatch, toy("seeds=2"), seconds=seconds)
    assert found["steps_per_second"] == 5.0
    assert found["tokens_per_second"] == 5.0 * 4 * 16
    assert _of_runs(monkeypatch, toy(), seconds=np.full((1, 2), np.nan), ends=(0, 1)) == {"steps_per_second": None}


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_utilisation_takes_the_peak_of_the_device_and_none_of_an_unknown_one(toy: Toy, monkeypatch, kind, peak) -> None:
    for devices in (1, 4):
        found = _of_runs(monkeypatch, toy(f"executor.data_devices={devices}"), kind)
        expected = found["tokens_per_second"] * found["flops_per_token"] / (peak * devices) if peak else None
        assert found["model_flops_utilisation"] == (pytest.approx(expected) if peak else None)


if __name__ == "__main__":
    if sys.argv[1] == "study":
        study.train(configs.load(LLAMA, sys.argv[3:]), sys.argv[2])
    else:
        _train_shared(Path(sys.argv[2]), *sys.argv[3:])
