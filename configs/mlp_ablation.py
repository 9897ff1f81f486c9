"""The ablations of arXiv 2605.04971, section 4: a 16-layer, 256-wide residual MLP on MNIST.

gcjax train --config configs/mlp_ablation.py:PRESET --workdir runs/mlp
"""

from ml_collections import ConfigDict

# Names say what a variant is: residual or not, normalization (LN plain LayerNorm, LNa affine), activation. Paper's order.
ACTIVATIONS = {"None": "none", "Radial": "radial", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "tanh": "tanh"}
NORMALIZATIONS = {"LN": "layernorm", "LNa": "layernorm_affine"}


def point(variant: str, setting: str = "", **changes) -> dict:
    """One point of a sweep, named after its variant and setting: what they set differently from the base."""
    skip, *normalization, activation = variant.split("+")
    model = {
        "residual": skip == "Res",
        "normalization": NORMALIZATIONS[normalization[0]] if normalization else "none",
        "activation": ACTIVATIONS[activation],
    }
    return {"point": f"{variant} {setting}".strip(), "variant": variant, **changes, "model": model | changes.get("model", {})}


def get_config(preset: str = "quick") -> ConfigDict:
    """The base below, with the points and seeds of `preset`."""
    config = ConfigDict(
        {
            "study": "mlp_ablation",
            "preset": preset,
            "variant": "",  # set by each point
            "points": (),  # what each point changes; one run for each seed
            "only": (),  # names of points to run; empty: all
            "seeds": 5,
            "first_seed": 0,
            "data": {
                "name": "mnist",  # mnist, fashion_mnist, kmnist
                "source": "asset",  # asset, idx, tfds; auto takes the full set where it is prepared, else the asset
                "directory": "",  # of the IDX files or of TFDS
            },
            "model": {
                "kind": "mlp",
                "depth": 16,
                "width": 256,
                "residual": True,
                "activation": "relu",  # f: none, relu, gelu, silu, tanh, radial; configs/mlp_mechanism.py has more
                "activation_scale": 1.0,  # a, of f(a x) / a + c
                "activation_shift": 0.0,  # c
                "negative_slope": 0.0,  # of leaky_relu
                "normalization": "none",  # none, layernorm, layernorm_affine (before the matrix)
                "form": "act_w",  # act(W h) or w_act: W act(h)
                "residual_scale": 1.0,
                "init_gain": 0.1,  # g: hidden entries ~ N(0, g^2 / width)
                "bias": False,
            },
            "optim": {
                "name": "adam",  # adam, adamw, sgd, momentum, rmsprop, muon
                "lr": 1e-3,
                "schedule": "constant",  # constant, cosine
                "warmup": 0,
                "final_fraction": 0.0,
                "b1": 0.9,
                "b2": 0.999,
                "eps": 1e-8,
                "momentum": 0.9,
                "nesterov": False,
                "weight_decay": 0.0,
                "clip_norm": 0.0,  # 0: no clipping
                "muon_adam_ratio": 0.5,  # learning rate of Adam, which trains the embeddings beside Muon, over Muon's
            },
            "train": {
                "steps": 4000,
                "batch_size": 64,
                "chunk": 250,  # steps between two looks from the host
            },
            "measure": {
                "rank": 8,
                "solver": "gram",  # gram, svd
                "early": (0, 1, 10, 100, 300),  # snapshots beside the regular ones
                "every": 800,
                "full": 8,  # snapshots that keep the whole-spectrum measures and the layer x layer maps
                "activity": 0,  # held-out images on which `gcjax.geometry.activity` is measured; 0: it is not
            },
            "executor": {
                "vmap_width": 0,  # runs side by side in one program; 0: 1 on CPU, 32 on accelerators
                "workers": 0,  # CPU cores, or groups of accelerators, to spread packs over; 0: all
                "run_devices": 1,  # devices that share a pack's runs
                "data_devices": 1,  # devices that share a run's batch
                "fsdp": False,  # they share its parameters too
            },
            "checkpoint": {"seconds": 20.0, "keep_params": False, "keep_snapshots": False},
            "claims": claims(),
        }
    )
    presets = {
        "quick": quick,
        "paper": paper,
        "init_scale": init_scale,
        "optimizer": optimizer,
        "normalization": normalization,
    }
    if preset not in presets:
        raise ValueError(f"there is no preset {preset!r}; there are: {', '.join(presets)}")
    config.update(presets[preset]())
    return config


def claims() -> dict:
    """Thresholds of the claims, fixed before any run; `gcjax/reporting/claims.py` says how each is used."""
    smooth = ("Res+ReLU", "Res+GELU", "Res+SiLU")
    rotation_free = ("Res+None", "Res+Radial")
    return {
        "min_seeds": 3,
        "confidence": 0.95,
        "spike": 1.0,  # nats
        "no_residual": {"variants": ("NoRes+tanh", "NoRes+None"), "margin": 0.05, "twin_min": 0.5},
        "residual_linear": {
            "variant": "Res+None",
            "reference": "Res+ReLU",
            "peak_min": 0.9,
            "drop_min": 0.2,
            "behind_min": 0.2,
            "gradient_min": 0.75,
        },
        "residual_radial": {
            "variant": "Res+Radial",
            "reference": "Res+ReLU",
            "peak_min": 0.9,
            "drop_min": 0.2,
            "behind_min": 0.2,
        },
        "residual_elementwise": {"variants": smooth, "end_min": 0.9, "drop_max": 0.1},
        "concentration": {
            "activation": "Res+ReLU",
            "layernorm": "Res+LN+None",
            "both": "Res+LN+ReLU",
            "dominance_min": 0.3,
        },
        "gradient_first": {"variants": (*rotation_free, *smooth), "gradient_min": 0.5, "margin": 0.05},
        "transfer": {"variants": smooth, "end_min": 0.5, "crossing": 0.5, "ratio_low": 0.5, "ratio_high": 2.0},
        "optimizer_free": {"upper": "Res+ReLU", "lower": rotation_free, "margin": 0.1, "min_settings": 2},
    }


ONE, HE = {"init_gain": 1.0}, {"init_gain": 2.0**0.5}
PLAIN = ("Res+None", "Res+Radial", "Res+ReLU", "Res+GELU", "Res+SiLU", "Res+tanh")
NORMALIZED = ("Res+LN+None", "Res+LN+ReLU", "Res+LNa+None", "Res+LNa+ReLU")


def quick() -> dict:
    """Does the effect exist, and who keeps it: four variants, 3 seeds.

    4 minutes on two cores. Weight v1, peak -> end: ReLU .96 -> .96, None .96 -> .4, Radial .94 -> .3 with loss spikes;
    NoRes+tanh stays at chance (.05).
    """
    points = (point("NoRes+tanh", model=ONE), point("Res+None"), point("Res+Radial"), point("Res+ReLU"))
    return {"points": points, "seeds": 3}


def paper() -> dict:
    """Every variant, 10 seeds; each NoRes with its residual twin at the same init gain (without residuals a small gain
    lets the signal die). Takes the full MNIST where it is prepared.

    One hour on two busy cores. At gain 0.1 ends: ReLU .96, GELU .97, SiLU .93, None .39, Radial .29 (7 of 10 runs spike),
    tanh .35, LN+None .81, LN+ReLU .95; at gain 1 Res+None's weights stay at chance while its gradients cohere (.73).
    """
    controls = (
        point("NoRes+tanh", model=ONE),
        point("Res+tanh", "g=1", model=ONE),
        point("NoRes+None", model=ONE),
        point("Res+None", "g=1", model=ONE),
        point("NoRes+ReLU", model=HE),
        point("Res+ReLU", "g=1.41", model=HE),
    )
    points = controls + tuple(point(name) for name in (*PLAIN, *NORMALIZED[:2]))
    return {"points": points, "seeds": 10, "data": {"source": "auto"}}


def init_scale() -> dict:
    """How much of it the initial weights decide: five gains; .577 is PyTorch's default, 1 keeps a linear layer's variance.

    10 minutes on two cores. End, gains in order: ReLU .97 .96 .95 .93 .75; None .42 .37 .47 .09 .05.
    """
    gains = {"0.03": 0.03, "0.1": 0.1, "0.3": 0.3, "0.577": 3.0**-0.5, "1": 1.0}
    points = tuple(
        point(name, f"g={label}", model={"init_gain": gain})
        for name in ("Res+None", "Res+ReLU")
        for label, gain in gains.items()
    )
    return {"points": points, "seeds": 3}


def optimizer() -> dict:
    """Is it Adam's doing: three variants under six optimizers. Adam with b1 = 0.9 and b2 = 0 divides by gradients near 0;
    it is here, whatever comes of it, beside b1 = b2 = 0 (the sign of the gradient).

    All 9 runs of b1 = 0.9, b2 = 0 diverge, and 2 of 3 of SGD with Radial. ReLU ends above None under Adam, b1 = b2 = 0, SGD
    and momentum (.96, .67, .65, .67), not under Muon (.31 to None's .33).
    """
    optimizers = {
        "adam": {"name": "adam", "lr": 1e-3},
        "adam b2=0": {"name": "adam", "lr": 3e-4, "b2": 0.0},
        "adam b1=b2=0": {"name": "adam", "lr": 3e-4, "b1": 0.0, "b2": 0.0},
        "sgd": {"name": "sgd", "lr": 0.03},
        "momentum": {"name": "momentum", "lr": 0.003},
        "muon": {"name": "muon", "lr": 2e-3, "nesterov": True},
    }
    points = tuple(
        point(name, label, optim=settings)
        for label, settings in optimizers.items()
        for name in ("Res+None", "Res+Radial", "Res+ReLU")
    )
    return {"points": points, "seeds": 3}


def normalization() -> dict:
    """What LayerNorm does to the rank profile: with and without an activation, plain and affine, 5 seeds.

    17 minutes on two busy cores. Cosines of ranks 1, 2, 8 at the end: ReLU .96 .34 .22; LN+None .80 .64 .53; LN+ReLU .96 .45
    .23; affine as plain (.81 .70 .62; .95 .45 .23); None .36 .32 .26.
    """
    return {"points": tuple(point(name) for name in ("Res+None", "Res+ReLU", *NORMALIZED)), "seeds": 5}
