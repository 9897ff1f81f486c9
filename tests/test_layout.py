"""What imports what: the layers of the package, and the verbs that need no JAX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "gcjax").rglob("*.py"))
LONGEST = 400
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "tensorflow", "tensorstore", "torch")
# Which file may import what only it knows.
OWNERS = {"flax": "gcjax/models/", "orbax": "gcjax/trees.py", "tensorstore": "gcjax/trees.py"}
# What other modules than optim.py may take from optax: losses and types, nothing that makes up an optimizer.
OPTAX = {"apply_updates", "GradientTransformation", "softmax_cross_entropy_with_integer_labels"}


def _imports(path: Path) -> set[str]:
    """The names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def _loaded_after(statement: str) -> set[str]:
    """The top-level modules of a fresh interpreter after `statement`."""
    code = f"import sys; {statement}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


def test_import_contracts_hold():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_short_and_say_what_they_are(path):
    source = path.read_text()
    assert source.count("\n") < LONGEST
    assert ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize(("package", "owner"), OWNERS.items())
def test_a_library_is_known_to_its_owner_alone(package, owner):
    users = {str(path.relative_to(ROOT)) for path in MODULES if any(n.split(".")[0] == package for n in _imports(path))}
    assert users
    assert all(user.startswith(owner) for user in users), users


def test_only_optim_builds_optax_chains():
    for path in MODULES:
        if path.name == "optim.py":
            continue
        tree = ast.walk(ast.parse(path.read_text()))
        used = {
            n.attr for n in tree if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "optax"
        }
        assert used <= OPTAX, path
        assert not {name for name in _imports(path) if name.startswith("optax.")}, path


def test_import_gcjax_brings_nothing_heavy():
    loaded = _loaded_after("import gcjax")
    assert "gcjax" in loaded
    assert not loaded & {*HEAVY, "matplotlib", "xarray", "numpy"}


@pytest.mark.parametrize("module", ["gcjax.results", "gcjax.config", "gcjax.reporting.report", "gcjax.__main__"])
def test_the_reporting_half_and_the_command_line_bring_no_jax(module):
    loaded = _loaded_after(f"import {module}")
    assert not loaded & set(HEAVY)


def test_no_reporting_module_imports_jax():
    reporting = [path for path in MODULES if path.parent.name == "reporting"]
    assert len(reporting) > 3
    names = ", ".join(f"gcjax.reporting.{path.stem}" for path in reporting if path.stem != "__init__")
    assert not _loaded_after(f"import {names}") & set(HEAVY)


def test_the_package_s_names_are_there_and_others_are_not():
    code = (
        "import gcjax; assert callable(gcjax.train); assert callable(gcjax.report); gcjax.geometry.continuity; "
        "gcjax.config.load; [getattr(gcjax, n) for n in gcjax.__all__]; assert not hasattr(gcjax, 'nonsense')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
