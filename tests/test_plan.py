"""The plan for a pod against what happens on virtual devices: bytes of state exactly, collectives as XLA compiled them."""

import collections
import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import CONFIGS, LLAMA, MLP, run_on_four

from gcjax import config as configs
from gcjax.errors import GcjaxError
from gcjax.training import executor, feed, plan, problem, sweep, train

PAPER = f"{CONFIGS / 'llama_wikitext.py'}:34m"
TOY_LLAMA = ("model.depth=2", "model.width=16", "model.heads=2", "model.key_value_heads=2", "model.head_dim=8",
             "model.mlp_width=24", "data.vocabulary=300", "train.batch_size=8", "train.window=16",
             "measure.rank=4")  # fmt: skip
TOY_MLP = ("model.depth=3", "model.width=32", "train.batch_size=8", "measure.rank=4", "executor.vmap_width=3")
# name -> config, what is overridden, run devices, data devices, FSDP
CASES: dict[str, tuple[str, tuple[str, ...], int, int, bool]] = {
    "runs and batch": (MLP, TOY_MLP, 2, 2, False),
    "tied embedding, microbatches": (LLAMA, (*TOY_LLAMA, "train.microbatches=2"), 1, 4, False),
    "tied embedding, fsdp": (LLAMA, TOY_LLAMA, 1, 4, True),
}
SCALARS = 256  # bytes, of losses and norms, that a step's program may communicate beside what is planned


def _config(name: str) -> Any:
    """The config of a case, with its mesh in the executor's section."""
    spec, overrides, runs, data, fsdp = CASES[name]
    mesh = (f"executor.run_devices={runs}", f"executor.data_devices={data}", f"executor.fsdp={fsdp}")
    return configs.load(spec, (*overrides, *mesh))


def _plan(name: str) -> plan.Plan:
    return plan.plan(_config(name), plan.HARDWARE["h100"], *CASES[name][2:])


# What really happens: in a process of its own, whose CPU poses as four

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def collectives(hlo: str, devices: int) -> dict[str, tuple[int, int]]:
    """Of a compiled chunk of one step: kind -> how many are run, and bytes of their whole arrays."""
    bodies, entry, name = collections.defaultdict[str, list[str]](list), "", ""
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name, entry = head[2], head[2] if head[1] else entry
        bodies[name].append(line)
    found = dict[str, tuple[int, int]]()

    def size(shapes: str) -> int:
        listed = re.findall(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]", shapes)
        bits = [(8 if kind == "pred" else int(kind.strip("bsuf")), dims) for kind, dims in listed]
        return sum(width // 8 * math.prod(map(int, filter(None, dims.split(",")))) for width, dims in bits)

    def run(name: str, times: int) -> None:
        for line in bodies[name][1:]:
            if done := re.search(rf"= (.*?) ({KINDS})\(", line):
                number, total = found.get(done[2], (0, 0))
                whole = size(done[1]) * (devices if done[2] == "reduce-scatter" else 1)
                found[done[2]] = (number + times, total + times * whole)
            elif " while(" in line:
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)  # the loop over steps has none; it runs once here
                run(re.search(r"body=%?([\w.-]+)", line)[1], times * (int(trips[1]) if trips else 1))
            else:
                for other in re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", line):
                    run(other, times)

    run(entry, 1)
    return found


def _observe(name: str) -> dict[str, Any]:
    """The subprocess: bytes on the first device after a real initialization, and the collectives of the chunk program."""
    config = _config(name)
    pack = max(sweep.packs(sweep.runs(config), config.executor.vmap_width), key=lambda one: len(one.runs))
    devices = executor.groups(config)[0]
    where, width = executor.placement(devices), executor.padded(len(pack.runs), devices)
    compiled = train.programs(pack.static, width, where, config.executor.fsdp)
    seeds, traced = jnp.arange(width, dtype=jnp.uint32), {path: jnp.ones(width) for path in pack.traced()}
    seeds, traced = jax.device_put((seeds, traced), compiled.runs)
    state, initial = compiled.init(seeds, traced)
    if "window" in config.train:
        arrays = {"train": np.zeros(1000, np.uint16), "valid": np.zeros((2, config.train.window + 1), np.uint16)}
    else:
        arrays = {"train_x": np.zeros((50, 784), np.uint8), "train_y": np.zeros(50, np.int32)}
    hlo = compiled.chunk.lower(state, traced, feed.place(config, arrays, where), np.int32(1)).compile().as_text()

    def held(tree: Any) -> int:
        parts = [part for x in jax.tree.leaves(tree) for part in x.addressable_shards]
        return sum(part.data.nbytes for part in parts if part.device == devices.flat[0])

    trees = {"parameters": state.params, "optimizer": state.opt_state, "cumulative": state.cumulative,
             "counters": (state.key, state.step), "initial": initial}  # fmt: skip
    return {"bytes": {key: held(tree) for key, tree in trees.items()},
            "collectives": collectives(hlo, config.executor.data_devices)}  # fmt: skip


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("plan") / "observed.json"
    run_on_four([__file__, str(out)], timeout=600)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_a_state_are_those_on_a_device(observed, name: str) -> None:
    memory = dataclasses.asdict(_plan(name).memory)
    assert {key: memory[key] for key in observed[name]["bytes"]} == observed[name]["bytes"]


@pytest.mark.parametrize("name", CASES)
def test_the_compiled_program_communicates_what_is_planned(observed, name: str) -> None:
    planned = {one.kind: one.payload for one in _plan(name).collectives}
    assert planned
    for kind in KINDS.split("|"):
        _, size = observed[name]["collectives"].get(kind, (0, 0))
        least = planned.get(kind, 0)
        assert least <= size <= least + SCALARS, f"{kind}: {observed[name]['collectives']} beside {planned}"


# What a plan says


@pytest.fixture(scope="module")
def paper() -> Any:
    return configs.load(PAPER)


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("hardware", ["h100", "v5e"])
def test_efficiency_falls_with_the_number_of_devices_that_share_a_batch(paper, hardware: str, fsdp: bool) -> None:
    plans = [plan.plan(paper, plan.HARDWARE[hardware], 1, n, fsdp and n > 1) for n in (1, 2, 16)]
    alone, *others = plans
    assert alone.collectives == ()
    assert alone.communicating == 0
    assert alone.efficiency == alone.overlapped == pytest.approx(1)
    for one, wider in zip(plans, others):
        assert wider.efficiency < one.efficiency
        assert wider.efficiency <= wider.overlapped
        assert wider.memory.activations < one.memory.activations
        assert (wider.memory.optimizer < one.memory.optimizer) == fsdp
        assert one.flops * one.devices == pytest.approx(wider.flops * wider.devices)


def test_runs_side_by_side_need_no_collectives_and_lose_only_by_padding() -> None:
    config = configs.load(MLP, ("executor.vmap_width=3", "seeds=3"))
    even, padded = (plan.plan(config, plan.HARDWARE["a100"], n) for n in (3, 2))
    assert even.collectives == padded.collectives == ()
    assert even.efficiency == pytest.approx(1)
    assert padded.runs == 2
    assert padded.efficiency == pytest.approx(3 / 4)


@pytest.mark.parametrize("joined", [1, 8, 64])
def test_a_ring_sends_as_much_whatever_links_it_takes(paper, joined: int) -> None:
    hardware = dataclasses.replace(plan.HARDWARE["h100"], joined=joined)
    (whole,) = plan.plan(paper, hardware, 1, 16).collectives
    assert whole.inside + whole.between == pytest.approx(2 * 15 / 16 * whole.payload)
    assert (whole.between == 0) == (joined >= 16)
    gather, scatter, rest = plan.plan(paper, hardware, 1, 16, fsdp=True).collectives
    assert (gather.kind, scatter.kind, rest.kind) == ("all-gather", "reduce-scatter", "all-reduce")
    for one in (gather, scatter):
        assert one.inside + one.between == pytest.approx(15 / 16 * one.payload)
    assert gather.payload + rest.payload == pytest.approx(whole.payload)


def test_flops_of_an_mlp_are_those_that_the_compiler_counts() -> None:
    """At depth 1, as the compiler counts the body of a scan once."""
    config = sweep.runs(configs.load(MLP, ("train.batch_size=64",)))[0].config
    config.model.depth = 1
    assert _compiled(config, 64).cost_analysis()["flops"] == pytest.approx(plan.flops_per_step(config), rel=0.1)


@pytest.mark.parametrize(("spec", "batch", "overrides"), [(MLP, 8192, ()), (LLAMA, 64, ("model.depth=3",))])
def test_activations_are_most_of_what_the_compiler_sets_aside(spec: str, batch: int, overrides: tuple[str, ...]) -> None:
    config = configs.load(spec, (*overrides, f"train.batch_size={batch}", "executor.vmap_width=1"))
    found = plan.plan(config, plan.HARDWARE["h100"]).memory.activations
    aside = _compiled(sweep.runs(config)[0].config, batch).memory_analysis().temp_size_in_bytes
    assert found == pytest.approx(aside, rel=0.5)


def _compiled(config: Any, batch: int) -> Any:
    """Loss and gradient of one batch."""
    built = problem.build(config)
    params = jax.eval_shape(built.init, jax.random.key(0))
    if "window" in config.train:
        examples: Any = jax.ShapeDtypeStruct((batch, config.train.window + 1), jnp.uint16)
    else:
        examples = (jax.ShapeDtypeStruct((batch, 784), jnp.uint8), jax.ShapeDtypeStruct((batch,), jnp.int32))
    return jax.jit(lambda p, b: train.gradients(built, p, b)).lower(params, examples).compile()


def test_a_pack_is_as_wide_as_on_an_accelerator(monkeypatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = configs.load(f"{CONFIGS / 'mlp_ablation.py'}:optimizer")
    assert executor.vmap_width(config) == plan.WIDTH
    widest = max(len(pack.runs) for pack in sweep.packs(sweep.runs(config), plan.WIDTH))
    assert plan.plan(config, plan.HARDWARE["h200"]).runs == widest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "3"), r"train\.batch_size=64 cannot be divided .*executor\.data_devices=3"),
        (("--devices", "8", "--run-devices", "3"), r"--devices 8 is no multiple of --run-devices 3"),
        (("--devices", "many"), r"--devices many is no multiple"),
        (("--device", "8"), r"no option --device; see --help"),
        (("--config.train.batchsize=8",), r"did you mean 'train\.batch_size'"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(GcjaxError, match=message):
        plan.main(["--config", PAPER, *arguments])


def test_the_command_prints_a_column_for_each_number_of_devices(capsys) -> None:
    plan.main(["--config", PAPER, "--devices", "1,8", "--fsdp", "--hardware", "v5e"])
    said = capsys.readouterr().out
    rows = {line[: -2 * 12].strip(): line[-2 * 12 :].split() for line in said.splitlines()[2 : 2 + len(plan.COLUMNS)]}
    assert tuple(rows) == plan.COLUMNS
    assert rows["devices"] == ["1", "8"]
    assert rows["MB params"] == ["134.8", "16.8"]
    assert "8 devices: reduce-scatter of " in said


def test_too_little_memory_is_said(capsys) -> None:
    plan.main(["--config", PAPER, "--devices", "1", "--hardware", "v5e", "--config.train.batch_size=256"])
    assert "1 devices: more than the 16 GB that each has" in capsys.readouterr().out


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({name: _observe(name) for name in CASES}))
