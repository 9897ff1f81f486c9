"""All tests run with the package's annotations checked: jaxtyping's shapes, by beartype, at every call.

A module that asks for the fixture `strict_promotion` also forbids implicit dtype promotion. It is not on for all,
because optax mixes int32 counts with float32 itself.
"""

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

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


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the processes that a test starts find what another one has compiled: a second start takes half the time."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
        yield folder
