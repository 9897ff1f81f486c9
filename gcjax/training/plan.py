"""The plan for a pod: what one step of a config takes on a mesh of accelerators, worked out without having any.

    python -m gcjax.training.plan --config configs/llama_wikitext.py:34m --devices 8 --hardware h100

The state's bytes are exact: its shapes are JAX's, its sharding is `train`'s own. FLOPs are the model's, as utilisation is
counted. Collectives are the least that a step needs: gradients summed once over the devices that share a batch or, where those
share the parameters too, parameters gathered once and gradients scattered once. Seconds follow from data sheets and from the
shares of them that `Hardware` states; activations are those that JAX keeps for the backward pass and that grow with the batch.
Left out: snapshots, and the time that kernels take to start, which on a GPU is most of a step of a network as small as the MLP.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from ml_collections import ConfigDict, FrozenConfigDict

from gcjax import config as configs
from gcjax.data import images
from gcjax.errors import GcjaxError
from gcjax.training import language, optim, study, sweep, throughput, train
from gcjax.training.problem import build

WIDTH = 32  # runs side by side on an accelerator, where the config leaves it open (`executor.vmap_width`)
FULL_SET = (60_000, 10_000)  # images of the largest data sets, to train and to test


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device and what joins it to others. Links: bytes that a device sends in a second, in one direction."""

    bfloat16: float  # peak FLOP/s of dense products
    float32: float  # of float32 ones at JAX's default precision: TF32 on NVIDIA's, one bfloat16 pass on TPUs
    memory: float  # bytes
    bandwidth: float  # of the memory, bytes/s
    joined: int  # devices that the fast links join: a host of GPUs, a slice of TPUs
    inside: float  # between those
    between: float  # a device's share of the network beyond
    # Assumptions, not from data sheets: what training reaches of the peaks, and the least that a collective takes.
    utilisation: float = 0.4
    delivered: float = 0.8  # of the bandwidths of memory and links
    latency: float = 2e-5  # seconds


# NVIDIA: data sheets of A100 80GB SXM, H100 SXM and H200 SXM (half of "with sparsity"; NVLink 600 and 900 GB/s both ways);
# hosts as DGX A100 and DGX H100/H200, with one 200 or 400 Gb/s InfiniBand port a GPU.
# TPU: cloud.google.com/tpu/docs/v4, /v5e, /v5p (ICI 2400, 1600 and 4800 Gb/s a chip, all its links together; data center
# network of a v5p chip 50 Gb/s, of a v5e pod 6.4 Tb/s over 256 chips; v4's is taken to be v5p's).
HARDWARE: Mapping[str, Hardware] = {
    "a100": Hardware(throughput.PEAKS["A100"], 156e12, 80e9, 2.039e12, 8, 300e9, 25e9),
    "h100": Hardware(throughput.PEAKS["H100"], 494e12, 80e9, 3.35e12, 8, 450e9, 50e9),
    "h200": Hardware(throughput.PEAKS["H200"], 494e12, 141e9, 4.8e12, 8, 450e9, 50e9),
    "v4": Hardware(throughput.PEAKS["TPU v4"], throughput.PEAKS["TPU v4"], 32e9, 1.2e12, 4096, 300e9, 6.25e9),
    "v5e": Hardware(throughput.PEAKS["TPU v5 lite"], throughput.PEAKS["TPU v5 lite"], 16e9, 0.819e12, 256, 200e9, 3.1e9),
    "v5p": Hardware(throughput.PEAKS["TPU v5p?"], throughput.PEAKS["TPU v5p?"], 95e9, 2.765e12, 6144, 600e9, 6.25e9),
}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device. The first five are exact, and there all the time."""

    parameters: int
    optimizer: int
    cumulative: int  # gradients
    counters: int  # keys and steps
    initial: int  # matrices as they were at first, which updates are measured against
    gradients: int  # with the parameters gathered from the other devices, where those share them
    activations: int
    data: int  # at most

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Collective:
    """What a step does of one kind."""

    kind: str  # "all-reduce", "all-gather", "reduce-scatter"
    count: int  # arrays; XLA combines small ones
    payload: int  # bytes of the whole arrays
    inside: float  # bytes that a device sends over the fast links
    between: float  # and beyond them


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step of a pack of runs on `run_devices` x `data_devices` devices; everything is a device's own."""

    devices: int
    runs: int  # that a device trains, padding included
    memory: Memory
    collectives: tuple[Collective, ...]
    flops: float
    computing: float  # seconds: arithmetic, then the state's and the gradients' way from memory and back
    communicating: float  # seconds
    efficiency: float  # ideal seconds, those of one device over the number of devices, over seconds
    overlapped: float  # the same with communication hidden behind computation, as far as there is enough of it


def plan(config: ConfigDict, hardware: Hardware, run_devices: int = 1, data_devices: int = 1, fsdp: bool = False) -> Plan:
    """The plan for the widest pack of a study, whatever mesh its own `executor` section names.

    `run_devices` share the pack's runs, `data_devices` each run's batch and, with `fsdp`, its parameters. A pack is as on
    accelerators. Raises `GcjaxError` for what `gcjax train` would refuse.
    """
    own = config.copy_and_resolve_references()
    with own.unlocked():
        own.executor.update(run_devices=run_devices, data_devices=data_devices, fsdp=fsdp)
    packs = sweep.packs(study.check(own), own.executor.vmap_width or WIDTH)
    pack = max(packs, key=lambda one: len(one.runs))
    run, runs, devices = pack.runs[0].config, math.ceil(len(pack.runs) / run_devices), run_devices * data_devices
    begun = _begun(pack.static, runs * run_devices)
    mesh = AbstractMesh((run_devices, data_devices), (train.RUN, train.DATA))
    (held, initial), (whole, _) = (jax.tree.map(partial(_part, mesh, shared), begun) for shared in (fsdp, False))
    pairs = list(zip(jax.tree.leaves(held.params), jax.tree.leaves(whole.params)))
    held_parts = (held.params, held.opt_state, held.cumulative, (held.key, held.step), initial)
    memory = Memory(
        *(sum(jax.tree.leaves(tree)) for tree in held_parts),
        gradients=sum(total * (2 if part < total else 1) for part, total in pairs),
        activations=runs * _activations(run, data_devices),
        data=sum(_bytes(x) for x in jax.tree.leaves(_data(run))),
    )
    bfloat16 = "dtype" in run.model and run.model.dtype == "bfloat16"
    peak = (hardware.bfloat16 if bfloat16 else hardware.float32) * hardware.utilisation

    def seconds(flops: float, moved: float) -> float:
        return flops / peak + 2 * moved / (hardware.bandwidth * hardware.delivered)  # read and written

    flops = runs * flops_per_step(run) / data_devices
    computing = seconds(flops, memory.parameters + memory.optimizer + memory.cumulative + memory.gradients)
    one_run = sum(jax.tree.leaves((whole.params, whole.opt_state, whole.cumulative, whole.params))) / runs  # and gradients
    ideal = len(pack.runs) * seconds(flops_per_step(run), one_run) / devices
    collectives = _collectives(pairs, runs, data_devices, hardware)
    communicating = sum(
        (one.inside / hardware.inside + one.between / hardware.between) / hardware.delivered + one.count * hardware.latency
        for one in collectives
    )
    return Plan(
        devices=devices,
        runs=runs,
        memory=memory,
        collectives=collectives,
        flops=flops,
        computing=computing,
        communicating=communicating,
        efficiency=ideal / (computing + communicating),
        overlapped=ideal / max(computing, communicating),
    )


def _begun(static: FrozenConfigDict, width: int) -> tuple[train.State, Any]:
    """Shapes of the state of `width` runs, and of the initial matrices beside it."""

    def begin(seed: jax.Array, traced: Mapping[str, jax.Array]) -> tuple[train.State, Any]:
        config = sweep.bind(static, traced)
        problem = build(config)
        state = train.init(problem, optim.build(config.optim, config.train.steps, problem.roles), seed)
        return state, problem.stacks(state.params)

    traced = {path: jnp.zeros(width) for path in sweep.traced(static)}
    return jax.eval_shape(jax.vmap(begin), jnp.zeros(width, jnp.uint32), traced)


def _part(mesh: AbstractMesh, fsdp: bool, x: jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's part of an array of the state."""
    return math.prod(train._sharding(mesh, fsdp, x).shard_shape(x.shape)) * x.dtype.itemsize


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def _collectives(pairs: Sequence[tuple[int, int]], runs: int, devices: int, hardware: Hardware) -> tuple[Collective, ...]:
    """Of a step, from the bytes of every parameter: a device's part of it, and the whole. Gradients are float32 as they are."""
    if devices == 1:
        return ()
    shared = [whole for part, whole in pairs if part < whole]
    summed = [whole for part, whole in pairs if part == whole] + [4 * runs]  # the losses
    found = [("all-gather", shared, 1), ("reduce-scatter", shared, 1), ("all-reduce", summed, 2)]
    return tuple(_collective(kind, arrays, times, devices, hardware) for kind, arrays, times in found if arrays)


def _collective(kind: str, arrays: Sequence[int], times: int, devices: int, hardware: Hardware) -> Collective:
    """On a ring each device sends (n - 1) / n of the payload, and for an all-reduce twice that. Where the ring leaves the fast
    links, it is one ring among them, over the whole, and one between their groups, over a member's part: as much in sum."""
    near = devices if devices <= hardware.joined else math.gcd(devices, hardware.joined)
    groups, payload = devices // near, sum(arrays)
    inside = times * (near - 1) / near * payload
    return Collective(kind, len(arrays), payload, inside, times * (groups - 1) / groups * payload / near)


def flops_per_step(config: ConfigDict) -> float:
    """Of a step of one run: forward and backward pass, products alone. An MLP's input needs no gradient."""
    batch, model = config.train.batch_size, config.model
    if "window" in config.train:
        return language.flops_per_token(config) * batch * config.train.window
    hidden = model.depth * model.width**2 + model.width * images.CLASSES
    return 6.0 * batch * hidden + 4.0 * batch * images.PIXELS * model.width


def _data(config: ConfigDict) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arrays that every device holds: of the largest that there are, as data is not loaded here."""

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    if "window" in config.train:
        windows = array(jnp.uint16, config.measure.valid_windows, config.train.window + 1)
        return {"train": array(jnp.uint16, config.data.device_bytes // 2), "valid": windows}
    sets = zip(("train", "test"), FULL_SET)
    return {
        f"{name}_{which}": array(dtype, count, *shape)
        for name, count in sets
        for which, dtype, shape in (("x", jnp.uint8, (images.PIXELS,)), ("y", jnp.int32, ()))
    }


def _activations(config: ConfigDict, data_devices: int) -> int:
    """Bytes that one run's forward pass leaves for its backward pass, of one device's part of a microbatch."""
    problem = build(config)
    params = jax.eval_shape(problem.init, jax.random.key(0))
    batch = jax.eval_shape(problem.batch, _data(config), jax.eval_shape(jax.random.key, 0), 0)

    def kept(examples: int) -> int:
        some = jax.tree.map(lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), batch)
        left = jax.eval_shape(lambda p, b: jax.vjp(lambda q: problem.loss(q, b), p)[1], params, some)
        return sum(_bytes(x) for x in jax.tree.leaves(left))

    # What does not grow with the batch is the parameters, which are counted already.
    return (kept(2) - kept(1)) * config.train.batch_size // (problem.microbatches * data_devices)


COLUMNS = ("devices", "runs", "MB params", "optim", "cumul.", "initial", "grads", "activ.", "data", "total", "MB sent",
           "GFLOP", "ms comp.", "ms comm.", "efficiency", "overlapped")  # fmt: skip


def row(one: Plan) -> list[str]:
    """A plan as a line of `COLUMNS`."""
    memory = one.memory
    sizes = (memory.parameters, memory.optimizer, memory.cumulative, memory.initial, memory.gradients, memory.activations,
             memory.data, memory.total, sum(each.inside + each.between for each in one.collectives))  # fmt: skip
    return [str(one.devices), str(one.runs), *(f"{size / 1e6:.1f}" for size in sizes), f"{one.flops / 1e9:.1f}",
            f"{one.computing * 1e3:.3f}", f"{one.communicating * 1e3:.3f}", f"{one.efficiency:.2f}",
            f"{one.overlapped:.2f}"]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """The command line; raises `GcjaxError`."""
    parser = argparse.ArgumentParser(
        "python -m gcjax.training.plan",
        description="What one step of a study takes on accelerators: bytes, collectives, seconds, efficiency. Needs none.",
        epilog="""--config.PATH=VALUE sets one field of the config.

examples:
  python -m gcjax.training.plan --config configs/llama_wikitext.py:34m --devices 1,8,16 --hardware h100
  python -m gcjax.training.plan --config configs/llama_wikitext.py:34m --devices 256 --hardware v5e --fsdp \\
      --config.train.batch_size=2048
  python -m gcjax.training.plan --config configs/mlp_ablation.py:paper --devices 8 --run-devices 8 --hardware h200""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE.py[:PRESET]", help="the study")
    parser.add_argument("--devices", default="8", metavar="N[,N...]", help="numbers of devices (default: %(default)s)")
    parser.add_argument("--run-devices", type=int, default=1, metavar="N", help="of which so many share a pack's runs, and the "
                        "others each run's batch (default: %(default)s)")  # fmt: skip
    parser.add_argument("--fsdp", action="store_true", help="devices that share a batch share the parameters too")
    parser.add_argument("--hardware", choices=HARDWARE, default="h100", help="(default: %(default)s)")
    options, rest = parser.parse_known_args(arguments)
    if unknown := [argument for argument in rest if not argument.startswith("--config.")]:
        raise GcjaxError(f"there is no option {unknown[0]}; see --help")
    config = configs.load(options.config, [argument.removeprefix("--config.") for argument in rest])
    hardware, plans = HARDWARE[options.hardware], list[Plan]()
    for text in options.devices.split(","):
        devices, shared = int(text) if text.isdigit() else 0, max(options.run_devices, 1)
        if devices < 1 or devices % shared:
            raise GcjaxError(f"--devices {text} is no multiple of --run-devices {shared}; give a number that is")
        plans.append(plan(config, hardware, shared, devices // shared, options.fsdp and devices > shared))
    print(f"{options.config} on {options.hardware}: a step, of one device; {hardware.utilisation:.0%} of its peak FLOP/s and "
          f"{hardware.delivered:.0%} of its bandwidths assumed\n")  # fmt: skip
    for name, *values in zip(COLUMNS, *(row(one) for one in plans)):
        print(f"{name:12s}" + "".join(f"{value:>12s}" for value in values))
    print()
    for one in plans:
        for each in one.collectives:
            print(f"{one.devices} devices: {each.kind} of {each.count} arrays, {each.payload / 1e6:.1f} MB; sent "
                  f"{each.inside / 1e6:.1f} MB over the fast links, {each.between / 1e6:.1f} MB beyond")  # fmt: skip
        if one.memory.total > hardware.memory:
            print(f"{one.devices} devices: more than the {hardware.memory / 1e9:.0f} GB that each has")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except GcjaxError as error:
        sys.exit(f"gcjax: {error}")
