"""Measures of geometric continuity for any stack of matrices, from any framework.

>>> import numpy as np, gcjax.geometry
>>> stack = [np.random.randn(64, 32) for _ in range(6)]     # W[out, in] of six layers; torch and JAX arrays work too
>>> c = gcjax.geometry.continuity(stack, rank=4)
>>> c.cosine_APK.shape                                       # (input, output) x adjacent pairs x singular rank
(2, 5, 4)
>>> gcjax.geometry.nulls.cosine_mean(32)                     # what chance gives for the input space
0.14...
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gcjax.errors import GcjaxError
from gcjax.geometry import nulls, spectra
from gcjax.geometry.continuity import Continuity, measure, measure_jit

__all__ = ["Continuity", "as_stack", "continuity", "measure", "nulls", "spectra"]


def as_stack(matrices: Any) -> jax.Array:
    """A stack `W[layer, out, in]` from an array of any framework (DLPack or `__array__`) or a sequence of matrices.

    Integers and half precision become float32. Raises `GcjaxError` unless there are at least two matrices of one shape,
    each at least 2 x 2.
    """
    if isinstance(matrices, Sequence):
        layers = [_as_array(matrix) for matrix in matrices]
        shapes = sorted({layer.shape for layer in layers})
        if len(shapes) > 1:
            raise GcjaxError(f"the matrices of a stack must have one shape, these have {', '.join(map(str, shapes))}")
        stack = jnp.stack(layers) if layers else jnp.zeros((0,))
    else:
        stack = _as_array(matrices)
    if stack.ndim != 3 or stack.shape[0] < 2 or min(stack.shape[1:]) < 2:
        raise GcjaxError(f"a stack is [layers >= 2, out >= 2, in >= 2], this one has the shape {stack.shape}")
    return stack if stack.dtype == jnp.float64 else stack.astype(jnp.float32)


def _as_array(value: Any) -> jax.Array:
    try:
        if isinstance(value, (np.ndarray, jax.Array)) or not hasattr(value, "__dlpack__"):
            array = jnp.asarray(value)
        else:
            for method in ("detach", "contiguous"):  # torch: DLPack takes no gradients, JAX no strides
                value = getattr(value, method)() if hasattr(value, method) else value
            array = jnp.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise GcjaxError(f"a {type(value).__name__} cannot be read as an array ({error}); give NumPy arrays") from error
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise GcjaxError("the matrices of a stack must be real, these are complex")
    return array


def continuity(matrices: Any, rank: int | None = None, solver: str = "svd") -> Continuity:
    """Measure a stack (see `as_stack`) for singular ranks 1..`rank` (8, or all where there are fewer, when None).

    `solver` is "svd" or "gram" (see `spectra`). Raises `GcjaxError` for a rank that the matrices do not have.
    """
    w_LOI = as_stack(matrices)
    return measure_jit(w_LOI, rank=min(8, *w_LOI.shape[1:]) if rank is None else rank, solver=solver)
