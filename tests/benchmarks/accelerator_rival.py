"""The default MLP in PyTorch, on the GPU where there is one, eager and compiled: what `accelerator.py` compares with.

    python tests/benchmarks/accelerator_rival.py eager|compiled SECONDS TOY

Prints a line of facts as JSON, then run-steps a second for every line that it reads (see contenders.py).
"""

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable

from contenders import Child

NAMES = ("eager", "compiled")


def start(toy: bool, seconds: float) -> dict[str, Child]:
    """Both as processes that wait to be told to measure; none where torch is missing."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    found = {}
    for name in NAMES if importlib.util.find_spec("torch") else ():
        try:
            found[name] = Child([sys.executable, __file__, name, str(seconds), str(int(toy))], cores, os.environ)
        except ValueError:  # it ended without a word
            print(f"PyTorch, {name}: did not start")
    return found


def build(name: str, toy: bool) -> tuple[Callable[[int], float], str]:
    """A function that takes that many steps and returns the seconds they took; and the device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    depth, width, batch = (3, 32, 16) if toy else (16, 256, 64)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32 on recent GPUs, as in JAX by default
    images, labels = torch.rand(4000, 784, device=device), torch.randint(0, 10, (4000,), device=device)
    shapes = [(784, width), *[(width, width)] * depth, (width, 10)]
    params = [torch.nn.Parameter(torch.randn(shape, device=device) * 0.1 / math.sqrt(width)) for shape in shapes]
    optimizer = torch.optim.Adam(params, lr=1e-3, fused=device == "cuda")

    def loss(x, y):
        h = x @ params[0]
        for w in params[1:-1]:
            h = h + torch.relu(h @ w)
        return torch.nn.functional.cross_entropy(h @ params[-1], y)

    if name == "compiled":  # with CUDA graphs; at toy size without a C++ compiler
        loss = torch.compile(loss, backend="aot_eager") if toy else torch.compile(loss, mode="reduce-overhead")

    def advance(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            rows = torch.randint(0, len(labels), (batch,), device=device)
            optimizer.zero_grad()
            loss(images[rows], labels[rows]).backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return advance, device


def main(name: str, seconds: float, toy: bool) -> None:
    try:
        advance, device = build(name, toy)
        advance(20)
        steps = max(1, round(seconds * 20 / advance(20)))
    except Exception as error:  # a compiler that is missing, most likely
        said = str(error).splitlines() or [""]
        print(json.dumps({"error": f"{type(error).__name__}: {said[0]}"}), flush=True)
        return
    import torch

    print(json.dumps({"device": device, "version": torch.__version__}), flush=True)
    for _ in sys.stdin:
        print(steps / advance(steps), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3] == "1")
