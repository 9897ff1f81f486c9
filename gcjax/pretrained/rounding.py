"""How far the storage format alone may have turned a matrix's leading vectors: an estimate, not a bound.

Worst-case bounds would flag every quantized matrix. Rounding errors are nearly independent, so a matrix stored with rms error
`eta` an entry has its leading vector turned, to first order and in the rms, by

    eta sqrt(sum_{j >= 2} (s_1^2 + s_j^2) / (s_1^2 - s_j^2)^2)

over the D dimensions of the vector's space, s_j = 0 beyond the rank (first-order perturbation of a singular vector under
noise of independent entries of one size: where a triplet holds much of the matrix, its large entries have large errors, and it
is turned by somewhat more).
"""

import math

import numpy as np

# Significand bits, the hidden one included.
SIGNIFICANDS = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8, "F8_E4M3": 4, "F8_E5M2": 3}
# Bits and entries of the blocks that share a scale, of GGUF's types.
BLOCKS = {"Q2_K": (2, 16), "Q3_K": (3, 16), "Q4_0": (4, 32), "Q4_1": (4, 32), "Q4_K": (4, 32), "IQ4_NL": (4, 32),
          "Q5_0": (5, 32), "Q5_1": (5, 32), "Q5_K": (5, 32), "Q6_K": (6, 16), "Q8_0": (8, 32)}  # fmt: skip
SYMMETRIC = ("Q3_K", "Q4_0", "Q5_0", "Q6_K", "Q8_0")  # blocks with a scale alone; the others have an offset too
_MANTISSA = 1.362  # rms of w over rms of 2^floor(log2 |w|), normal entries


def rms_error(w_OI: np.ndarray, dtype: str, energy: float) -> float:
    """`eta` of a matrix of `energy` = `||W||_F^2` that was stored as `dtype` (see `files.Tensor`); NaN for a format that is not
    known."""
    if dtype in SIGNIFICANDS:
        rms = math.sqrt(energy / w_OI.size)
        return rms / _MANTISSA * 2.0 ** (1 - SIGNIFICANDS[dtype]) / math.sqrt(12)
    if dtype not in BLOCKS or w_OI.shape[-1] % BLOCKS[dtype][1]:
        return math.nan
    bits, size = BLOCKS[dtype]
    blocks = w_OI.reshape(-1, size)
    low, high = blocks.min(axis=1), blocks.max(axis=1)
    step = (2 * np.maximum(high, -low) if dtype in SYMMETRIC else high - low) / (2**bits - 1)
    return math.sqrt(float(np.mean(step.astype(np.float64) ** 2)) / 12)


def angle(eta: float, s_K: np.ndarray, energy: float, least: int, d: int) -> float:
    """The rms angle, radians, in a space of dimension `d`, of a matrix whose smaller dimension is `least`.

    `s_K` are its leading singular values; those beyond K are taken to be equal, with what `energy` = `||W||_F^2` leaves.
    """
    square = s_K.astype(np.float64) ** 2
    tail = max(energy - square.sum(), 0.0) / max(least - len(square), 1)
    other = np.concatenate([square[1:], [tail, 0.0]])
    count = np.concatenate([np.ones(len(square) - 1), [least - len(square), d - least]])
    return float(eta * np.sqrt(np.sum(count * (square[0] + other) / (square[0] - other) ** 2)))
