"""How fast the `quick` group trains, against what a user would otherwise write (issue 2).

    python tests/benchmarks/training.py [--seconds 3] [--repeats 7]

Prints run-steps a second on one core for gcjax, a hand-written jitted JAX loop, and eager PyTorch (extra `bench`; left out
where torch is missing); gcjax on all cores; the share of a run that its snapshots take; compile times; and the floor that
FLOPs and bytes set. Every contender is a process pinned to a core; they take turns, so that a busy moment meets all of them.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from contenders import Child

PRESET = str(Path(__file__).parents[2] / "configs/mlp_ablation.py") + ":quick"
POINT = "Res+ReLU"
SIZE = 3 * 2**20  # numbers in the array that is copied: with its copy as large as what a step reads and writes
TRAINED = 1000  # steps before snapshots are timed: the eigensolver is faster on the low-rank sums that training makes
Advance = Callable[[int], None]  # run that many steps and wait for them


def gcjax_steps() -> tuple[Advance, dict[str, float]]:
    """The package's own programs, a pack of one run, as a worker runs them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from gcjax import config as configs
    from gcjax.training import executor, problem, sweep, train

    config = configs.load(PRESET, {})
    listed = [run for run in sweep.runs(config) if run.point == POINT][:1]
    (pack,) = sweep.packs(listed, 1)
    data = jax.device_put(problem.load_data(config)[0])
    programs = train.programs(pack.static, 1, jax.devices()[0])
    traced = {path: jnp.asarray(values, jnp.float32) for path, values in pack.traced().items()}
    seeds = jnp.asarray([run.seed for run in pack.runs], jnp.uint32)
    (state, initial), init_s = timed(lambda: programs.init(seeds, traced))
    (state, _), chunk_s = timed(lambda: programs.chunk(state, traced, data, np.int32(1)))

    def snapshot(whole: bool):
        return timed(lambda: programs.snapshot(state, initial, traced, data, np.bool_(whole)))[1]

    first_s = snapshot(True)
    state, _ = programs.chunk(state, traced, data, np.int32(TRAINED))
    whole_s, brief_s = (statistics.median(snapshot(whole) for _ in range(5)) for whole in (True, False))
    snapshots, full = len(executor.snapshot_steps(config)), len(executor.full_steps(config))

    def advance(steps: int) -> None:
        nonlocal state
        state, _ = jax.block_until_ready(programs.chunk(state, traced, data, np.int32(steps)))

    facts = {
        "compile init": init_s,
        "compile chunk": chunk_s,
        "compile snapshot": first_s - whole_s,
        "full snapshots": full,
        "full snapshot": whole_s,
        "other snapshots": snapshots - full,
        "other snapshot": brief_s,
        "steps": config.train.steps,
        **floor(jax),
    }
    return advance, facts


def floor(jax) -> dict[str, float]:
    """This core's matrix product and copy rates, in the shapes that a step has."""
    import jax.numpy as jnp

    x, w = jnp.ones((64, 256)), jnp.ones((256, 256))
    many = jax.jit(lambda x, w: jax.lax.fori_loop(0, 1000, lambda _, x: (x @ w) * 1e-3, x))
    copy = jax.jit(lambda a: a + 1.0)
    a = jnp.ones(SIZE)
    timed(lambda: many(x, w)), timed(lambda: copy(a))
    return {
        "FLOP/s": 2 * 64 * 256 * 256 * 1000 / min(timed(lambda: many(x, w))[1] for _ in range(5)),
        "byte/s": 8 * SIZE / min(timed(lambda: copy(a))[1] for _ in range(5)),
    }


def timed(call: Callable):
    import jax

    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return result, time.perf_counter() - start


def jax_steps() -> tuple[Advance, dict[str, float]]:
    """What one would write by hand: a list of layers, optax.adam, a jitted step with donation, a Python loop."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    rng = np.random.default_rng(0)
    images, labels = jnp.asarray(rng.random((4000, 784), np.float32)), jnp.asarray(rng.integers(0, 10, 4000))
    shapes = [(784, 256), *[(256, 256)] * 16, (256, 10)]
    params = [jnp.asarray(rng.normal(0, 0.1 / 16, shape), jnp.float32) for shape in shapes]
    tx = optax.adam(1e-3)

    def loss(params, x, y):
        h = x @ params[0]
        for w in params[1:-1]:
            h = h + jax.nn.relu(h @ w)
        return optax.softmax_cross_entropy_with_integer_labels(h @ params[-1], y).mean()

    def step(params, opt_state, key):
        key, draw = jax.random.split(key)
        rows = jax.random.randint(draw, (64,), 0, len(labels))
        updates, opt_state = tx.update(jax.grad(loss)(params, images[rows], labels[rows]), opt_state)
        return optax.apply_updates(params, updates), opt_state, key

    jitted = jax.jit(step, donate_argnums=(0, 1))
    carry = (params, tx.init(params), jax.random.key(0))

    def advance(steps: int) -> None:
        nonlocal carry
        for _ in range(steps):
            carry = jitted(*carry)
        jax.block_until_ready(carry)

    return advance, {}


def torch_steps() -> tuple[Advance, dict[str, float]]:
    """The same model in eager PyTorch, one thread."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = torch.rand(4000, 784), torch.randint(0, 10, (4000,))
    shapes = [(784, 256), *[(256, 256)] * 16, (256, 10)]
    params = [torch.nn.Parameter(torch.randn(shape) * 0.1 / 16) for shape in shapes]
    optimizer = torch.optim.Adam(params, lr=1e-3)

    def advance(steps: int) -> None:
        for _ in range(steps):
            rows = torch.randint(0, len(labels), (64,))
            h = images[rows] @ params[0]
            for w in params[1:-1]:
                h = h + torch.relu(h @ w)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(h @ params[-1], labels[rows]).backward()
            optimizer.step()

    return advance, {}


CONTENDERS = {"gcjax": gcjax_steps, "jitted JAX loop": jax_steps, "eager PyTorch": torch_steps}


def contender(name: str, seconds: float) -> None:
    """The child's side: warm up, then one measurement for each line on standard input."""
    advance, facts = CONTENDERS[name]()
    advance(50)
    start = time.perf_counter()
    advance(50)
    steps = max(1, round(seconds * 50 / (time.perf_counter() - start)))
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        advance(steps)
        print(steps / (time.perf_counter() - start), flush=True)


def child(name: str, core: int, seconds: float) -> Child:
    """A contender on a core of its own, in the environment of the package's CPU workers."""
    from gcjax.training.workers import worker_environment

    command = [sys.executable, __file__, "--contender", name, "--seconds", str(seconds)]
    return Child(command, [core], worker_environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default: 3)")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each contender (default: 7)")
    args = parser.parse_args()
    if args.contender:
        contender(args.contender, args.seconds)
        return

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    names = [name for name in CONTENDERS if name != "eager PyTorch" or importlib.util.find_spec("torch")]
    alone = {name: child(name, cores[0], args.seconds) for name in names}
    others = [child("gcjax", core, args.seconds) for core in cores[1:]]
    rates = {name: [] for name in names}
    together = []
    for _ in range(args.repeats):
        for name, one in alone.items():
            one.start()
            rates[name].append(one.rate())
        team = [alone["gcjax"], *others]
        for one in team:
            one.start()
        together.append(sum(one.rate() for one in team))
    facts = alone["gcjax"].facts
    for one in [*alone.values(), *others]:
        one.end()

    own = rates["gcjax"]
    print(f"{args.repeats} measurements of {args.seconds} s each, taking turns; median [min, max]; ratios within a turn\n")
    for name in names:
        times = spread(ratio(rates[name], own))
        print(f"{name:18s} {spread(rates[name])} run-steps/s on one core   gcjax takes {times} of its time")
    print(f"{f'gcjax, {len(cores)} cores':18s} {spread(together)} run-steps/s   {spread(ratio(together, own))} of one core's")
    training = facts["steps"] / statistics.median(own)
    counts = {kind: (facts[f"{kind} snapshots"], facts[f"{kind} snapshot"]) for kind in ("full", "other")}
    snapshots = sum(count * each for count, each in counts.values())
    listed = " and ".join(f"{count} {kind} ones of {each:.3f} s" for kind, (count, each) in counts.items())
    print(f"\nsnapshots: {listed} beside {training:.1f} s of steps: {snapshots / (snapshots + training):.1%} of a run")
    print("compile: " + ", ".join(f"{name[8:]} {facts[name]:.1f} s" for name in facts if name.startswith("compile")))
    parameters = 784 * 256 + 16 * 256 * 256 + 256 * 10
    flops, traffic = 6 * 64 * parameters, 9 * 4 * parameters  # p, m, v, g, sum read; p, m, v, g, sum written, less one
    for amount, unit, rate in ((flops, "FLOP", facts["FLOP/s"]), (traffic, "byte", facts["byte/s"])):
        print(f"floor of a step: {amount / 1e6:.0f} M{unit} = {amount / rate * 1e3:.2f} ms at {rate / 1e9:.0f} G{unit}/s")


def ratio(upper: list[float], lower: list[float]) -> list[float]:
    return [a / b for a, b in zip(upper, lower, strict=True)]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):7.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    main()
