"""How fast the `mini` transformer trains, against the same model and optimizer in eager PyTorch (extra `bench`).

    python tests/benchmarks/language.py [--seconds 10] [--repeats 5]

Prints tokens a second of both in two settings: runs side by side, one a core, as `gcjax train` has them; and one run on all
cores, a thread a core. Beside them the floor: the FLOPs of a step at the rate of one core's matrix products. Contenders are
processes pinned to their cores; they take turns, so that a busy moment meets all of them. gcjax also sums up the raw gradients,
which PyTorch here does not.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contenders import Child

PRESET = str(Path(__file__).parents[2] / "configs/llama_wikitext.py") + ":mini"
POINT = "SiLU"
SIDE = 1024  # of the square matrices whose product gives a core's rate
Advance = Callable[[int], None]  # run that many steps and wait for them


def run_config() -> Any:
    """The config of the one run that is timed."""
    from gcjax import config as configs
    from gcjax.training import sweep

    return next(run.config for run in sweep.runs(configs.load(PRESET)) if run.point == POINT)


def gcjax_steps(threads: int) -> tuple[Advance, dict[str, float]]:
    """The package's own chunk program, a pack of one run, as a worker runs it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from gcjax.training import feed, language, problem, sweep, train

    config, device = run_config(), jax.devices()[0]
    pack = sweep.Pack("", sweep.static(config), (sweep.Run(POINT, POINT, 0, config),))
    data = feed.place(config, problem.load_data(config)[0], device)
    programs = train.programs(pack.static, 1, device)
    traced = {path: jnp.asarray(values, jnp.float32) for path, values in pack.traced().items()}
    state, _ = programs.init(jnp.zeros(1, jnp.uint32), traced)
    parameters = sum(value.size for value in state.params.values())

    def advance(steps: int) -> None:
        nonlocal state
        state, _ = jax.block_until_ready(programs.chunk(state, traced, data, np.int32(steps)))

    a = jnp.ones((SIDE, SIDE))
    rate = 2 * SIDE**3 / min(timed(lambda: jax.block_until_ready(a @ a)) for _ in range(10))
    tokens = config.train.batch_size * config.train.window
    facts = {"parameters": parameters, "tokens": tokens, "FLOP": language.flops_per_token(config) * tokens, "FLOP/s": rate}
    return advance, facts


def torch_steps(threads: int) -> tuple[Advance, dict[str, float]]:
    """The same decoder, windows, schedule, clipping and AdamW in eager PyTorch."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional

    from gcjax.data import text

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = run_config()
    model, optim, B, T = config.model, config.optim, config.train.batch_size, config.train.window
    D, H, E = model.width, model.heads, model.head_dim
    corpus = text.load(config.data.source, config.data.files, config.data.vocabulary, config.data.valid_fraction).train_T
    tokens_T = torch.from_numpy(corpus.astype(np.int64))
    angle_TE = torch.outer(torch.arange(T), model.rope_theta ** (-torch.arange(0, E, 2) / E)).repeat(1, 2)
    cos_TE, sin_TE = angle_TE.cos(), angle_TE.sin()

    def rotate(x_BHTE):
        a, b = x_BHTE.chunk(2, dim=-1)
        return x_BHTE * cos_TE + torch.cat((-b, a), dim=-1) * sin_TE

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.mlp_norm = (nn.RMSNorm(D, eps=model.norm_eps) for _ in range(2))
            self.q, self.k, self.v = (nn.Linear(D, H * E, bias=False) for _ in range(3))
            self.o = nn.Linear(H * E, D, bias=False)
            self.gate, self.up = (nn.Linear(D, model.mlp_width, bias=False) for _ in range(2))
            self.down = nn.Linear(model.mlp_width, D, bias=False)

        def forward(self, h_BTD):
            x_BTD = self.attention_norm(h_BTD)
            q, k, v = (project(x_BTD).view(-1, T, H, E).transpose(1, 2) for project in (self.q, self.k, self.v))
            y_BHTE = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            h_BTD = h_BTD + self.o(y_BHTE.transpose(1, 2).reshape(-1, T, H * E))
            x_BTD = self.mlp_norm(h_BTD)
            return h_BTD + self.down(functional.silu(self.gate(x_BTD)) * self.up(x_BTD))

    embedding, final_norm = nn.Embedding(model.vocabulary, D), nn.RMSNorm(D, eps=model.norm_eps)
    layers = nn.ModuleList(Layer() for _ in range(model.depth))
    parameters = [*embedding.parameters(), *layers.parameters(), *final_norm.parameters()]
    for value in parameters:
        if value.ndim == 2:
            nn.init.normal_(value, std=model.init_std)
    groups = [
        {"params": [value for value in parameters if value.ndim == 2], "weight_decay": optim.weight_decay},
        {"params": [value for value in parameters if value.ndim == 1], "weight_decay": 0.0},
    ]
    settings = {"lr": optim.lr, "betas": (optim.b1, optim.b2), "eps": optim.eps}
    optimizer, done = torch.optim.AdamW(groups, **settings, fused=True), 0

    def advance(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            starts_B = torch.randint(0, len(tokens_T) - T, (B,))
            window_BT = tokens_T[starts_B[:, None] + torch.arange(T + 1)]
            h_BTD = embedding(window_BT[:, :-1])
            for layer in layers:
                h_BTD = layer(h_BTD)
            logits_BTV = functional.linear(final_norm(h_BTD), embedding.weight)
            optimizer.zero_grad()
            functional.cross_entropy(logits_BTV.flatten(0, 1), window_BT[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(parameters, optim.clip_norm)
            cosine = (1 + math.cos(math.pi * min(done / config.train.steps, 1.0))) / 2
            for group in optimizer.param_groups:
                group["lr"] = optim.lr * (optim.final_fraction + (1 - optim.final_fraction) * cosine)
            optimizer.step()
            done += 1

    def step_takes(**implementation: bool) -> float:
        nonlocal optimizer
        optimizer = torch.optim.AdamW(groups, **settings, **implementation)
        advance(2)
        return min(timed(optimizer.step) for _ in range(5))

    quickest = min(("fused", "foreach"), key=lambda name: step_takes(**{name: True}))
    optimizer = torch.optim.AdamW(groups, **settings, **{quickest: True})
    return advance, {"parameters": sum(value.numel() for value in parameters), "fused": quickest == "fused"}


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


CONTENDERS = {"gcjax": gcjax_steps, "eager PyTorch": torch_steps}


def contender(name: str, threads: int, seconds: float) -> None:
    """The child's side: warm up, then one measurement for each line on standard input."""
    advance, facts = CONTENDERS[name](threads)
    advance(2)
    advance(2)  # what compiles or allocates does so within two calls
    steps = max(1, round(seconds * 2 / timed(lambda: advance(2))))
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        print(steps / timed(lambda: advance(steps)), flush=True)


def child(name: str, cores: Sequence[int], seconds: float) -> Child:
    """A contender with a thread for each of its cores; on one core in the environment of the package's CPU workers."""
    from gcjax.training.workers import worker_environment

    count = str(len(cores))
    environment = worker_environment() if len(cores) == 1 else os.environ | {"NPROC": count, "OMP_NUM_THREADS": count}
    command = [sys.executable, __file__, "--contender", name, "--threads", count, "--seconds", str(seconds)]
    return Child(command, cores, environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: 10)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each contender (default: 5)")
    args = parser.parse_args()
    if args.contender:
        contender(args.contender, args.threads, args.seconds)
        return

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    beside, shared = f"{len(cores)} runs, one a core", f"one run, {len(cores)} threads"
    teams = {(beside, name): [child(name, [core], args.seconds) for core in cores] for name in CONTENDERS}
    teams |= {(shared, name): [child(name, cores, args.seconds)] for name in CONTENDERS}
    facts = teams[beside, "gcjax"][0].facts
    tokens, rates = facts["tokens"], {key: [] for key in teams}
    assert all(team[0].facts["parameters"] == facts["parameters"] for team in teams.values()), "not the same model"
    for _ in range(args.repeats):
        for key, team in teams.items():
            for one in team:
                one.start()
            rates[key].append(tokens * sum(one.rate() for one in team))
    for team in teams.values():
        for one in team:
            one.end()

    print(f"{args.repeats} measurements of {args.seconds} s each, taking turns; median [min, max]; ratios within a turn")
    fused = teams[beside, "eager PyTorch"][0].facts["fused"]
    print(f"{facts['parameters'] / 1e6:.2f} M parameters; PyTorch with AdamW({'fused' if fused else 'foreach'}=True)\n")
    for setting in (beside, shared):
        own, other = rates[setting, "gcjax"], rates[setting, "eager PyTorch"]
        for name, values in (("gcjax", own), ("eager PyTorch", other)):
            print(f"{setting:22s} {name:14s} {spread(values, 0)} tokens/s")
        print(f"{setting:22s} {'gcjax has':14s} {spread([a / b for a, b in zip(own, other, strict=True)], 2)} times the rate")
    floor = facts["FLOP"] / facts["FLOP/s"]
    one = len(cores) * tokens / statistics.median(rates[beside, "gcjax"])
    work, rate = facts["FLOP"] / 1e9, facts["FLOP/s"] / 1e9
    print(f"\nfloor of a step on one core: {work:.1f} GFLOP at {rate:.0f} GFLOP/s = {floor * 1e3:.0f} ms: "
          f"{tokens / floor:.0f} tokens/s")  # fmt: skip
    print(f"gcjax takes {one * 1e3:.0f} ms beside its neighbours, {one / floor:.2f} of that")


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):7.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


if __name__ == "__main__":
    main()
