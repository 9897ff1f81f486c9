"""Why continuity is kept or lost: symmetry, its strength, the activation's mean, or its even part? The MLP of `mlp_ablation`.

gcjax train --config configs/mlp_mechanism.py:PRESET --workdir runs/mechanism
"""

from pathlib import Path

from ml_collections import ConfigDict

from gcjax import config as configs

CONSTANT = 0.1  # c of "tanh + c" in the factorial
SOFT = 100.0  # soft threshold at 1 / SOFT = 0.01, below the first pre-activations' rms of 0.03: else nothing would be learned


def point(variant: str, activation: str, **model) -> dict:
    """A residual network with that activation; its other settings are part of the variant."""
    return {"point": variant, "variant": variant, "model": {"activation": activation, **model}}


def get_config(preset: str = "factorial") -> ConfigDict:
    """The base of `mlp_ablation`, with measures of what activations do, and the points of `preset`."""
    presets = {"factorial": factorial, "dose": dose, "symmetry": symmetry}
    symmetric = {"factorial": ("None", "Radial"), "dose": ("leaky 1",), "symmetry": ("None", "Radial")}
    if preset not in presets:
        raise ValueError(f"there is no preset {preset!r}; there are: {', '.join(presets)}")
    config = configs.load(str(Path(__file__).with_name("mlp_ablation.py"))).copy_and_resolve_references()
    config.unlock()
    del config.claims
    points = presets[preset]()
    broken = tuple(point["variant"] for point in points if point["variant"] not in symmetric[preset])
    config.update(
        {
            "study": "mlp_mechanism",
            "preset": preset,
            "points": points,
            "seeds": 5,
            "checkpoint": {"keep_snapshots": preset == "symmetry"},
            "measure": {"rank": 16, "every": 500, "activity": 500},
            "claims": {
                "min_seeds": 3,
                "confidence": 0.95,
                "spike": 1.0,
                # Fixed before any run: an activation that breaks the symmetry ends that far ahead of the linear network.
                "symmetry_breaking": {"lower": symmetric[preset][0], "variants": broken, "margin": 0.2},
            },
        }
    )
    return config


def factorial() -> tuple[dict, ...]:
    """Activations that keep or break rotation symmetry, odd or with an even part, with a mean of their own or without.

    Half an hour on two cores. v1 at the end: ReLU, GELU and ReLU less its mean over features .96, SiLU .92, softsign .68,
    tanh + c .66, |x| .61, None .36, tanh .34, Radial .27; spikes in all runs of |x| and of ReLU less its batch mean.
    """
    return (
        # symmetric, odd, no mean
        point("None", "none"),
        point("Radial", "radial"),
        # broken, odd, no mean
        point("tanh", "tanh"),
        point("softsign", "softsign"),
        point("soft threshold", "soft_threshold", activation_scale=SOFT),
        # broken, with an even part and a mean
        point("ReLU", "relu"),
        point("GELU", "gelu"),
        point("SiLU", "silu"),
        point("|x|", "abs"),
        point("tanh + c", "tanh", activation_shift=CONSTANT),
        # broken, with an even part, the mean removed
        point("ReLU - feature mean", "relu_less_mean"),
        point("ReLU - batch mean", "relu_less_batch_mean"),
        # symmetric in all but one direction, which is the mean
        point("Radial + 1", "radial_constant"),
    )


def dose() -> tuple[dict, ...]:
    """Leaky ReLU from linear (slope 1) through ReLU (0) to |x| (-1); tanh(x) + c; tanh(a x) / a, nearly linear to a sign."""
    slopes = tuple(
        point(f"leaky {slope:g}", "leaky_relu", negative_slope=slope) for slope in (1.0, 0.75, 0.5, 0.25, 0.0, -0.5, -1.0)
    )
    shifts = tuple(point(f"tanh + {c:g}", "tanh", activation_shift=c) for c in (0.0, 0.01, 0.03, 0.1, 0.3, 1.0))
    scales = tuple(point(f"tanh a={a:g}", "tanh", activation_scale=a) for a in (0.1, 0.3, 3.0, 10.0, 30.0))
    return slopes + shifts + scales


def symmetry() -> tuple[dict, ...]:
    """Weights kept along training, one gigabyte, for `gcjax symmetry DIR`: is it moves that change nothing?"""
    return (point("None", "none"), point("Radial", "radial"), point("ReLU", "relu"), point("tanh", "tanh"))
