"""Geometric continuity of neural networks: measure how singular vectors line up from layer to layer, and why.

    dataset = gcjax.train(gcjax.config.load("configs/mlp_ablation.py:quick"), "runs/mlp")
    gcjax.report("runs/mlp")
    dataset = gcjax.measure("smollm2-135m", "runs/smollm2")
    directory = gcjax.convert("smollm2-135m", "models/smollm2")
    measures = gcjax.geometry.continuity(stack_of_matrices)

Everything is imported when it is first used: `import gcjax` alone brings neither JAX nor matplotlib.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcjax import config, geometry
    from gcjax.pretrained.converted import convert
    from gcjax.pretrained.measure import measure
    from gcjax.reporting.report import report
    from gcjax.training.study import train

__all__ = ["config", "convert", "geometry", "measure", "report", "train"]


def __getattr__(name: str) -> Any:
    match name:
        case "config" | "geometry":
            return importlib.import_module(f"gcjax.{name}")
        case "train":
            return importlib.import_module("gcjax.training.study").train
        case "convert":
            return importlib.import_module("gcjax.pretrained.converted").convert
        case "measure":
            return importlib.import_module("gcjax.pretrained.measure").measure
        case "report":
            return importlib.import_module("gcjax.reporting.report").report
    raise AttributeError(f"module 'gcjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
