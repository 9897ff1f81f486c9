"""All tests run with the package's annotations checked (jaxtyping with beartype) and with strict dtype promotion."""

import jaxtyping

jaxtyping.install_import_hook("gcjax", "beartype.beartype")  # before gcjax is imported

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
