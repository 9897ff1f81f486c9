"""How fast runs went: steps and tokens a second, and model FLOPs utilisation where the device's peak is known."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gcjax.training import language
from gcjax.training.sweep import Run

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets; a regular expression for words of jax.Device.device_kind.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "TPU v6 lite": 918e12, "TPU v5 lite": 197e12,
         "TPU v5p?": 459e12, "TPU v4": 275e12}  # fmt: skip


def of_runs(
    listed: Sequence[Run], width: int, seconds_RC: np.ndarray, ends: Sequence[int], snapshots: Sequence[int]
) -> dict[str, Any]:
    """Medians over runs and over chunks that follow no snapshot, compilation and restart; None where there is none.

    `seconds` are those from the end of the chunk before. Keys: steps_per_second of one run and, for language models,
    tokens_per_second, flops_per_token and model_flops_utilisation. `width` runs share a device.
    """
    lengths = np.diff([0, *ends])
    usual = [i for i in range(2, len(ends)) if lengths[i] and not {ends[i], ends[i - 1], ends[i - 2]} & set(snapshots)]
    usual = usual or [i for i in range(2, len(ends)) if lengths[i]]
    rates = lengths[usual] / seconds_RC[:, usual]
    if not np.isfinite(rates).any():
        return {"steps_per_second": None}
    found: dict[str, Any] = {"steps_per_second": float(np.nanmedian(rates))}
    config = listed[0].config
    if "window" in config.train:
        tokens = found["steps_per_second"] * config.train.batch_size * config.train.window
        kind, flops = jax.local_devices()[0].device_kind, language.flops_per_token(config)
        peak = next((rate for name, rate in PEAKS.items() if re.search(rf"\b{name}\b", kind)), None)
        devices = config.executor.run_devices * config.executor.data_devices
        used = tokens * width * flops / (peak * devices) if peak else None
        found |= {"tokens_per_second": tokens, "flops_per_token": flops, "model_flops_utilisation": used}
    return found
