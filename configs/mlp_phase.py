"""Phase maps: where in the plane of init gain and learning rate the MLP of `mlp_ablation` has continuity, and when it loses it.

gcjax train --config configs/mlp_phase.py:PRESET --workdir runs/phase
"""

from pathlib import Path

from ml_collections import ConfigDict

from gcjax import config as configs

VARIANTS = {"Res+None": "none", "Res+Radial": "radial", "Res+tanh": "tanh", "Res+ReLU": "relu"}


def get_config(preset: str = "small") -> ConfigDict:
    """The base of `mlp_ablation` on the grid of `preset`; gain and learning rate are traced, so a variant is one program."""
    presets = {"small": small, "full": full}
    if preset not in presets:
        raise ValueError(f"there is no preset {preset!r}; there are: {', '.join(presets)}")
    config = configs.load(str(Path(__file__).with_name("mlp_ablation.py"))).copy_and_resolve_references()
    config.unlock()
    config.update({"study": "mlp_phase", "preset": preset, **presets[preset]()})
    return config


def grid(gains: tuple[float, ...], rates: tuple[float, ...]) -> tuple[dict, ...]:
    """Every variant at every gain and rate."""
    return tuple(
        {
            "point": f"{variant} g={gain:g} lr={rate:g}",
            "variant": variant,
            "model": {"activation": activation, "init_gain": gain},
            "optim": {"lr": rate},
        }
        for variant, activation in VARIANTS.items()
        for gain in gains
        for rate in rates
    )


def small() -> dict:
    """4 variants x 4 gains x 4 rates, one seed, 2,000 steps."""
    points = grid((0.03, 0.1, 0.3, 1.0), (1e-4, 3e-4, 1e-3, 3e-3))
    return {
        "points": points,
        "seeds": 1,
        "train": {"steps": 2000},
        "measure": {"every": 500, "early": (0, 100, 250), "full": 4},
    }


def full() -> dict:
    """4 variants x 8 gains x 8 rates, 3 seeds, 8,000 steps; for accelerators, or `--shard`. NOT RUN yet."""
    gains, rates = (0.01, 0.03, 0.1, 0.2, 0.3, 3.0**-0.5, 1.0, 2.0**0.5), (3e-5, 1e-4, 3e-4, 6e-4, 1e-3, 2e-3, 4e-3, 1e-2)
    return {"points": grid(gains, rates), "seeds": 3, "train": {"steps": 8000}}
