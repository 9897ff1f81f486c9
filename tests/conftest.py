"""All tests run with the package's annotations checked: jaxtyping's shapes, by beartype, at every call.

A module that asks for the fixture `strict_promotion` also forbids implicit dtype promotion. It is not on for all,
because optax mixes int32 counts with float32 itself.
"""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest

# Before JAX is imported, here and in the processes that tests start. Compiling the tests' small programs takes longer than
# running them: it is done once for all, and with less effort.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="gcjax-compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}

# Before gcjax is imported. An int is a float, as PEP 484 has it.
jaxtyping.install_import_hook("gcjax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

# `pytest --hypothesis-profile search` looks for new counterexamples.
hypothesis.settings.register_profile("search", deadline=None, database=None, max_examples=1000)
hypothesis.settings.register_profile("gcjax", deadline=None, derandomize=True, database=None, max_examples=25)
hypothesis.settings.load_profile("gcjax")


@pytest.fixture(scope="module")
def strict_promotion() -> Iterator[None]:
    """No implicit dtype promotion while the module's tests run."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> Iterator[None]:
    """What JAX has cached for a module's tests is not looked through again: later, a collection would take seconds."""
    yield
    gc.freeze()
