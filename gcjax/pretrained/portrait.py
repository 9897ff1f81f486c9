"""One matrix of a checkpoint -> its portrait: the little that has to be kept of it to compare it with every other layer.

Two forms: `raw`, the matrix as stored, and `effective`, with its norm's gains folded in (`Gain`). A matrix without a gain
has the raw form alone, and its effective form is the same.

| name in a portrait | shape | what |
|---|---|---|
| state | | "measured", "not finite" or "zero"; only a measured matrix has the rest |
| rounding | | rms error an entry of the storage format |
| FORM/u, FORM/v | O K, I K | leading singular vectors |
| FORM/s | K + 1 or K | leading singular values, one more than vectors where it is known |
| FORM/residual, FORM/energy | | of the leading triplet; `||W||_F^2` |
| FORM/passes, FORM/method | | of Krylov iteration; see `gcjax.geometry.decompose` |
| FORM/gram, FORM/sigma2 | 2 | exact alignments with the layer before, (input, output); where both matrices are small |
| FORM/probed_input, FORM/probed_output | I N, O N | `gcjax.geometry.sketch`; where not |
| FORM/fourth | | `||W^T W||_F^2`, where the matrix was decomposed whole |
| null/input or null/output | N D | leading vector in the gain's space under each of `draws` random frames |
| null/gain | D | the gains |
"""

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gcjax.geometry import krylov, sketch
from gcjax.geometry.decompose import Decomposition, alignments, decompose, null_leading
from gcjax.geometry.krylov import Frame
from gcjax.pretrained.options import Options
from gcjax.pretrained.rounding import rms_error

Portrait = dict[str, np.ndarray]


class Weight(NamedTuple):
    """A matrix in memory, with the gain of its norm (None: it has none)."""

    name: str  # projection and layer; seeds what is random about it
    dtype: str  # storage
    w_OI: jax.Array  # float32
    gain_D: jax.Array | None
    output: bool  # the gain multiplies the output


def draw(weight: Weight, before: Mapping[str, Decomposition], options: Options) -> tuple[Portrait, dict[str, Decomposition]]:
    """The portrait of a matrix and, by form, all its triplets where it is small; `before` has those of the layer before it."""
    w_OI, gain_D = weight.w_OI, weight.gain_D
    energy = _energy(w_OI, None)
    if not np.isfinite(energy) or energy == 0:
        return {"state": np.array("zero" if energy == 0 else "not finite")}, {}
    eta = rms_error(np.asarray(w_OI), weight.dtype, energy)
    portrait: Portrait = {"state": np.array("measured"), "rounding": np.array(eta)}
    frames: dict[str, Frame | None] = {"raw": None}
    energies = [energy]
    if gain_D is not None:
        frames["effective"] = krylov.gains(gain_D, weight.output)
        energies.append(_energy(w_OI, gain_D[:, None] if weight.output else gain_D))
    small, wholes = min(w_OI.shape) <= options.exact_below, {}
    decomposed = decompose(w_OI, list(frames.values()), options.rank, options.seed, options.tolerance, options.exact_below)
    for form, energy, found in zip(frames, energies, decomposed):
        kept = {
            "u": found.u_OK[:, : options.rank],
            "v": found.v_IK[:, : options.rank],
            "s": found.s_K[: options.rank + 1],
            "residual": np.float64(found.residual),
            "energy": np.float64(energy),
            "passes": np.int64(found.passes),
            "method": np.array(found.method),
        }
        if found.whole:
            kept["fourth"] = np.float64(np.sum(found.s_K**4))
        if small:
            wholes[form] = found
            if form in before:
                kept["gram"], kept["sigma2"] = alignments(before[form], found)
        portrait |= {f"{form}/{name}": value for name, value in kept.items()}
    if not small:
        z_IN, z_ON = (sketch.probes(d, options.probes, options.seed) for d in w_OI.shape[::-1])
        probed = sketch.apply_grams(w_OI, list(frames.values()), z_IN, z_ON, energies)
        for form, (hz_IN, hz_ON) in zip(frames, probed):
            portrait |= {f"{form}/probed_input": np.asarray(hz_IN), f"{form}/probed_output": np.asarray(hz_ON)}
    if gain_D is not None:
        drawn = [krylov.random_frame(jax.random.key(seed), gain_D, weight.output) for seed in _seeds(weight.name, options)]
        portrait["null/output" if weight.output else "null/input"] = null_leading(w_OI, drawn, options.seed)
        portrait["null/gain"] = np.asarray(gain_D)
    return portrait, wholes


def _energy(w_OI: jax.Array, gain: jax.Array | None) -> float:
    """`||W||_F^2`, the gain folded in; without a second matrix in memory."""
    return float(np.sum(np.asarray(_row_squares(w_OI, gain), np.float64)))


@jax.jit
def _row_squares(w_OI: jax.Array, gain: jax.Array | None) -> jax.Array:
    w_OI = w_OI if gain is None else w_OI * gain
    return jnp.sum(w_OI * w_OI, axis=1)


def _seeds(name: str, options: Options) -> list[int]:
    """Other frames for every matrix and draw."""
    state = np.random.SeedSequence([options.seed, zlib.crc32(name.encode())]).generate_state(options.draws)
    return [int(seed) for seed in state]
