"""How fast one accelerator is at everything that gcjax does (issue 5): one command, a table, and a record in a JSON file.

    python tests/benchmarks/accelerator.py                                 # a GPU or TPU
    python tests/benchmarks/accelerator.py --only sweep,language --out h100.json
    python tests/benchmarks/accelerator.py --toy                           # any device, toy sizes, a minute

sweep     run-steps a second of the default MLP for vmap widths 1 to 256, the share of the device's matrix products that the
          best reaches, and its ratio to the same loop in PyTorch, eager and compiled, on the same device
snapshot  seconds of a snapshot by solver and width
language  tokens a second and model FLOPs utilisation of the 34M-parameter transformer
measure   seconds a layer of Llama-3.1-8B's and 70B's shapes, and the share of the memory's bandwidth

Data are synthetic (random pixels, random tokens of the tokenizer's range, random weights with a few planted triplets): nothing
is fetched, and speed does not depend on it. Along the way it checks that a chunk donates its state, is not compiled again, and
runs without the host. Times are medians of repeats after a warm-up. A section that fails is reported, the others still run,
and the exit status is then 1.
"""

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import accelerator_rival
from contenders import Child

CONFIGS = Path(__file__).parents[2] / "configs"
POINT = "Res+ReLU"
LAYERS = {"Llama-3.1-8B": {"width": 4096, "hidden": 14336, "kv": 1024},
          "Llama-3.1-70B": {"width": 8192, "hidden": 28672, "kv": 1024}}  # fmt: skip
TOY = {
    "widths": (1, 4),
    "snapshots": (2,),
    "mlp": ("model.depth=3", "model.width=32", "train.batch_size=16"),
    "llama": ("model.depth=2", "model.width=32", "model.heads=2", "model.key_value_heads=2", "model.head_dim=16",
              "model.mlp_width=48", "data.vocabulary=300", "train.batch_size=8", "train.window=32", "measure.rank=4"),
    "layers": {"toy": {"width": 256, "hidden": 256, "kv": 256}},
    "matmul": 256,
    "copy": 2**20,
}  # fmt: skip
FULL = {"widths": (1, 2, 4, 8, 16, 32, 64, 128, 256), "snapshots": (1, 4, 16, 64, 256), "mlp": (), "llama": (),
        "layers": LAYERS, "matmul": 8192, "copy": 2**28}  # fmt: skip
LONG = 5.0  # seconds of a call, beyond which it is timed once
SLOWEST = 120.0  # seconds of one width, compilation included, beyond which wider ones are left out


class Timer(NamedTuple):
    """Times calls, waiting for their results."""

    seconds: float  # of a measurement of many steps
    repeats: int

    def once(self, call: Callable[[], Any]) -> float:
        import jax

        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start

    def median(self, call: Callable[[], Any]) -> float:
        """Of repeats after a warm-up, in which it may compile; of one where that takes long."""
        self.once(call)
        first = self.once(call)
        again = self.repeats - 1 if first < LONG else 0
        return statistics.median([first, *(self.once(call) for _ in range(again))])

    def rate(self, advance: Callable[[int], Any]) -> float:
        """Steps a second, from measurements of about `seconds` each."""
        self.once(lambda: advance(1))
        steps = 1
        while (took := self.once(lambda: advance(steps))) < min(self.seconds, 0.2):  # noqa: B023
            steps *= 2
        steps = max(1, round(steps * self.seconds / took))
        return steps / statistics.median(self.once(lambda: advance(steps)) for _ in range(self.repeats))


def device_rates(sizes: Mapping[str, Any], timer: Timer) -> dict[str, Any]:
    """What the device reaches in a big matrix product and a big copy, and what its maker says."""
    import jax
    import jax.numpy as jnp

    from gcjax.training import throughput

    side, kind = sizes["matmul"], jax.devices()[0].device_kind
    product = jax.jit(jnp.matmul)
    found: dict[str, Any] = {}
    for name, a in {name: jnp.ones((side, side), name) for name in ("float32", "bfloat16")}.items():
        found[name] = 2 * side**3 / timer.median(lambda: product(a, a))  # noqa: B023
    whole, negate = jnp.ones(sizes["copy"]), jax.jit(jnp.negative)
    found["copy"] = 2 * whole.nbytes / timer.median(lambda: negate(whole))
    host = jax.device_get(whole)
    found["upload"] = whole.nbytes / timer.median(lambda: jax.device_put(host, jax.devices()[0]))
    found["sheet"] = next((peak for name, peak in throughput.PEAKS.items() if re.search(rf"\b{name}\b", kind)), None)
    sheet = f"data sheet {found['sheet'] / 1e12:.0f}" if found["sheet"] else "not in gcjax.training.throughput.PEAKS"
    print(f"products {found['float32'] / 1e12:.2f} TFLOP/s in JAX's float32, {found['bfloat16'] / 1e12:.2f} in bfloat16 "
          f"({sheet}); copy {found['copy'] / 1e9:.1f} GB/s; upload {found['upload'] / 1e9:.1f} GB/s")  # fmt: skip
    return found


class Trained:
    """A pack of `width` runs of a config on the first device, as the package trains it; `advance` runs steps."""

    def __init__(self, config: Any, width: int, arrays: Mapping[str, Any]):
        import jax
        import jax.numpy as jnp

        from gcjax.training import sweep, train

        self.config, self.width, device = config, width, jax.devices()[0]
        pack = sweep.Pack("", sweep.static(config), (sweep.Run("", "", 0, config),) * width)
        self.programs = train.programs(pack.static, width, device)
        self.traced = {path: jax.device_put(jnp.asarray(values), device) for path, values in pack.traced().items()}
        self.data = jax.device_put(dict(arrays), device)
        self.state, self.initial = self.programs.init(jax.device_put(jnp.arange(width, dtype="uint32"), device), self.traced)

    def advance(self, steps: int) -> Any:
        import jax
        import numpy as np

        count = jax.device_put(np.int32(steps))  # by itself it would be a transfer that the guard forbids
        self.state, losses = self.programs.chunk(self.state, self.traced, self.data, count)
        return self.state, losses

    def snapshots(self, solver: str) -> Callable[[], Any]:
        """What takes a snapshot without the measures over the whole spectrum, as most are."""
        import jax
        import numpy as np

        from gcjax.training import sweep, train

        config = self.config.copy_and_resolve_references()
        config.measure.solver = solver
        take = train.programs(sweep.static(config), self.width, jax.devices()[0]).snapshot
        return lambda: take(self.state, self.initial, self.traced, self.data, np.bool_(False))

    def complaints(self) -> list[str]:
        """Whether a chunk keeps its old state, is compiled a second time, or needs the host while it runs."""
        import jax
        import numpy as np

        compiled = list[str]()
        jax.block_until_ready(self.advance(1))
        before, count = jax.tree.leaves(self.state.params)[0], jax.device_put(np.int32(3))
        program = self.programs.chunk.lower(self.state, self.traced, self.data, count).as_text()
        jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
        try:
            with jax.transfer_guard("disallow"):
                self.state, _ = jax.block_until_ready(self.programs.chunk(self.state, self.traced, self.data, count))
            found = ["a chunk is compiled again"] if any("backend_compile" in event for event in compiled) else []
            found += [] if before.is_deleted() else ["a chunk does not take over its state's memory"]
            found += [f"a chunk calls the host: {name}" for name in set(re.findall(r"infeed|outfeed|\w*callback\w*", program))]
        except jax.errors.JaxRuntimeError as error:
            found = [f"a chunk moves data between host and device: {str(error).splitlines()[0]}"]
        print(f"  {'; '.join(found) or 'a chunk donates its state, is compiled once and leaves the host alone'}")
        return found


def study(name: str, *overrides: str) -> Any:
    """The config of one run of a preset."""
    from gcjax import config as configs
    from gcjax.training import sweep

    return sweep.runs(configs.load(str(CONFIGS / name), overrides))[0].config


def mlp(sizes: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Config and random pixels."""
    import numpy as np

    from gcjax.data import images

    rng, counts = np.random.default_rng(0), {"train": 4000, "test": 1000}
    arrays = {f"{part}_x": rng.integers(0, 256, (n, images.PIXELS), np.uint8) for part, n in counts.items()}
    arrays |= {f"{part}_y": rng.integers(0, images.CLASSES, n, np.int32) for part, n in counts.items()}
    return study("mlp_ablation.py:quick", f"only={POINT}", *sizes["mlp"]), arrays


def widening(widths: tuple[int, ...], measured: Callable[[int], Any]) -> Iterator[tuple[int, Any]]:
    """What is measured at each width, up to the one that takes too long or does not fit."""
    for width in widths:
        begun = time.perf_counter()
        try:
            yield width, measured(width)
        except Exception as error:
            if width == widths[0] or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"  width {width} does not fit into the device's memory")
            return
        if time.perf_counter() - begun > SLOWEST:
            print(f"  wider ones left out: this one took {time.perf_counter() - begun:.0f} s")
            return


def sweep(sizes: Mapping[str, Any], rates: Mapping[str, Any], timer: Timer, rivals: Mapping[str, Child]) -> dict[str, Any]:
    import jax

    from gcjax.training import plan

    config, arrays = mlp(sizes)
    flops, by_width = plan.flops_per_step(config), dict[int, float]()
    found: dict[str, Any] = {"run_steps_per_second": by_width, "pytorch": {}}

    def measured(width: int) -> float:
        trained = Trained(config, width, arrays)
        if width == 1:
            found["complaints"] = trained.complaints()
        return width * timer.rate(trained.advance)

    for width, rate in widening(sizes["widths"], measured):
        by_width[width] = rate
        print(f"  width {width:3d} {rate:10.1f} run-steps/s, {rate * flops / rates['float32']:.2%} of the device's products")
    rate, best = max((rate, width) for width, rate in by_width.items())
    alone, share = by_width[1], rate * flops / rates["sheet"] if rates["sheet"] else None
    found |= {"best_width": best, "share_of_products": rate * flops / rates["float32"], "share_of_sheet": share}
    sheet = f", {share:.2%} of the data sheet's in bfloat16" if share else ""
    print(f"  best: width {best}, {rate:.1f} run-steps/s, {rate / alone:.1f} times width 1{sheet}")
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    for name, rival in rivals.items():
        if rival.facts.get("device") != platform:
            print(f"  PyTorch, {name}: {rival.facts.get('error', 'not on this device')}")
            continue
        try:
            other = statistics.median([rival.start() or rival.rate() for _ in range(timer.repeats)])
        except (OSError, ValueError):
            print(f"  PyTorch, {name}: ended while it was measured")
            continue
        found["pytorch"][name] = other
        print(f"  PyTorch, {name}: {other:.1f} run-steps/s; gcjax has {alone / other:.2f} times that at width 1, "
              f"{rate / other:.2f} times at width {best}")  # fmt: skip
    return found


def snapshot(sizes: Mapping[str, Any], rates: Mapping[str, Any], timer: Timer, rivals: Any) -> dict[str, Any]:
    config, arrays = mlp(sizes)

    def measured(width: int) -> dict[str, float]:
        trained = Trained(config, width, arrays)
        trained.advance(20)
        return {solver: timer.median(trained.snapshots(solver)) for solver in ("gram", "svd")}

    found = dict[int, Any]()
    for width, found[width] in widening(sizes["snapshots"], measured):
        listed = [f"{solver} {took:.3f} s, {took / width:.4f} s a run" for solver, took in found[width].items()]
        print(f"  width {width:3d}: {', '.join(listed)}")
    return {"seconds": found}


def language(sizes: Mapping[str, Any], rates: Mapping[str, Any], timer: Timer, rivals: Any) -> dict[str, Any]:
    import jax
    import numpy as np

    from gcjax.training.language import flops_per_token

    for parts in (1, 2, 4, 8, 16):
        config = study("llama_wikitext.py:34m", "only=SiLU", f"train.microbatches={parts}", *sizes["llama"])
        train, rng = config.train, np.random.default_rng(0)
        tokens = {"train": rng.integers(0, config.model.vocabulary, 2**20, np.uint16)}
        tokens["valid"] = rng.integers(0, config.model.vocabulary, (8, train.window + 1), np.uint16)
        try:
            trained = Trained(config, 1, tokens)
            complaints = trained.complaints()
            rate = timer.rate(trained.advance) * train.batch_size * train.window
            break
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or parts == 16 or train.batch_size % (2 * parts):
                raise
            print(f"  a batch in {parts} parts does not fit into the device's memory")
            trained = None
    used, product = rate * flops_per_token(config), rates[config.model.dtype]
    stats = jax.devices()[0].memory_stats() or {}
    found = {"tokens_per_second": rate, "microbatches": parts, "flops_per_token": flops_per_token(config),
             "share_of_products": used / product, "model_flops_utilisation": used / rates["sheet"] if rates["sheet"] else None,
             "peak_bytes": stats.get("peak_bytes_in_use"), "complaints": complaints}  # fmt: skip
    text = f", {found['model_flops_utilisation']:.1%} model FLOPs utilisation" if rates["sheet"] else ""
    share = f"{used / product:.1%} of the device's products in {config.model.dtype}"
    print(f"  {rate:.0f} tokens/s, {share}{text}; batch in {parts} parts")
    return found


def measure(sizes: Mapping[str, Any], rates: Mapping[str, Any], timer: Timer, rivals: Any) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from gcjax.geometry import krylov
    from gcjax.pretrained.measure import leave_the_cores_to_xla
    from gcjax.pretrained.options import Options
    from gcjax.pretrained.portrait import Weight, draw

    leave_the_cores_to_xla()  # as measure does
    options = Options(exact_below=min(768, min(layer["kv"] for layer in sizes["layers"].values()) - 1))

    @partial(jax.jit, static_argnums=1)
    def weight(key: Any, shape: tuple[int, int]) -> Any:
        """Random, with a dozen triplets above the bulk, as measuring.py's checkpoints have them."""
        (o, i), (bulk, left, right) = shape, jax.random.split(key, 3)
        u, v = jax.random.normal(left, (o, 12)) / math.sqrt(o), jax.random.normal(right, (i, 12)) / math.sqrt(i)
        w = jax.random.normal(bulk, (o, i)) * (0.3 / (math.sqrt(o) + math.sqrt(i)))
        return w + (u * jnp.arange(1.0, 13.0) ** -0.35) @ v.T

    found: dict[str, Any] = {}
    for model, layer in sizes["layers"].items():
        width, hidden, kv = layer["width"], layer["hidden"], layer["kv"]
        shapes = {"q": (width, width), "k": (kv, width), "v": (kv, width), "o": (width, width), "gate": (hidden, width),
                  "up": (hidden, width), "down": (width, hidden)}  # fmt: skip
        seconds, moved = {}, 0
        for index, (name, shape) in enumerate(shapes.items()):
            w_OI = weight(jax.random.key(index), shape)
            gain_D = None if name in ("o", "down") else jnp.exp(0.2 * jax.random.normal(jax.random.key(9), (width,)))
            one = Weight(f"{name} 0", "BF16", w_OI, gain_D, False)
            with counted(krylov) as passes:
                timer.once(lambda: draw(one, {}, options)[0]["raw/s"])  # noqa: B023
            moved += sum(passes) * w_OI.nbytes
            seconds[name] = timer.median(lambda: draw(one, {}, options)[0]["raw/s"])  # noqa: B023
        whole = sum(seconds.values())
        found[model] = {"seconds": seconds, "layer": whole, "share_of_bandwidth": moved / whole / rates["copy"]}
        print(f"  {model}: {whole:.3f} s a layer, {moved / 1e9:.1f} GB of passes over its matrices at "
              f"{moved / whole / rates['copy']:.1%} of the copy's bandwidth; " +
              ", ".join(f"{name} {took:.3f}" for name, took in seconds.items()))  # fmt: skip
    return found


@contextlib.contextmanager
def counted(krylov: Any) -> Iterator[list[int]]:
    """A list that gets an entry for every product with a whole matrix."""
    passes, kept = list[int](), (krylov._product, krylov._transposed)

    def count(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a: (passes.append(1), call(*a))[1]

    krylov._product, krylov._transposed = map(count, kept)
    try:
        yield passes
    finally:
        krylov._product, krylov._transposed = kept


SECTIONS = {"sweep": sweep, "snapshot": snapshot, "language": language, "measure": measure}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="NAME[,NAME...]", help="sections (default: %(default)s)")
    parser.add_argument("--toy", action="store_true", help="toy sizes, for CPU devices: shows that it runs, not how fast")
    parser.add_argument("--seconds", type=float, help="of a measurement of many steps (default: 1, at toy size 0.2)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("accelerator.json"), help="to append to (default: %(default)s)")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(SECTIONS)}")
    seconds = args.seconds or (0.2 if args.toy else 1.0)
    records = json.loads(args.out.read_text()) if args.out.exists() else []

    if args.toy:  # compile quickly rather than well
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    # Before JAX, which takes most of a GPU's memory and does not like to be forked.
    rivals = accelerator_rival.start(args.toy, seconds) if "sweep" in chosen else {}

    import jax

    from gcjax.provenance import origin

    if jax.default_backend() == "cpu" and not args.toy:
        parser.error("JAX finds no accelerator here; --toy runs on CPU devices, at toy size")
    sizes, timer = (TOY if args.toy else FULL), Timer(seconds, args.repeats)
    record: dict[str, Any] = {**origin(), "platform": jax.devices()[0].client.platform_version, "toy": args.toy, "failed": {}}
    record["torch"] = {name: one.facts for name, one in rivals.items()}
    print(f"{record['device']}, {record['versions']}{', TOY SIZES' if args.toy else ''}")
    record["rates"] = device_rates(sizes, timer)
    for name in chosen:
        print(f"\n{name}")
        begun = time.perf_counter()
        try:
            record[name] = SECTIONS[name](sizes, record["rates"], timer, rivals)
            record["failed"] |= {name: "; ".join(record[name]["complaints"])} if record[name].get("complaints") else {}
        except Exception as error:  # whatever it is, the others may still run
            traceback.print_exc()
            record["failed"][name] = f"{type(error).__name__}: {error}"
            print(f"  FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        print(f"  {time.perf_counter() - begun:.0f} s in all")
        args.out.write_text(json.dumps([*records, record], indent=1))
    for one in rivals.values():
        one.end()
    print(f"\nappended to {args.out}" + (f"; FAILED: {', '.join(record['failed'])}" if record["failed"] else ""))
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
