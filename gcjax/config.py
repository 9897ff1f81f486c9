"""Configs: Python files whose `get_config(preset)` returns a `ConfigDict`; every default of a run stands in it."""

import ast
import json
import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from gcjax.errors import GcjaxError, nearest


def load(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """The locked config of `FILE.py[:PRESET]` with overrides `path=value` applied in order.

    Raises `GcjaxError` for a missing file, an unknown preset, a misspelt field (naming the nearest one) or a value of the
    wrong type.
    """
    file, _, preset = spec.partition(":")
    if not Path(file).is_file():
        raise GcjaxError(f"the config {file} does not exist; --config takes FILE.py or FILE.py:PRESET")
    try:
        module = runpy.run_path(file)
        if "get_config" not in module:
            raise GcjaxError(f"{file} defines no get_config; a config is a Python file with get_config(preset)")
        config = module["get_config"](preset) if preset else module["get_config"]()
    except (ValueError, SyntaxError) as error:
        raise GcjaxError(f"{spec}: {error}") from error
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise GcjaxError(f"the override --config.{override} has no value; write --config.{path}=VALUE")
        _set(config, spec, path, text)
    return config.lock()


def _set(config: ConfigDict, spec: str, path: str, text: str) -> None:
    known = [name for name, _ in leaves(config) if not name.startswith("points.")]
    if path not in known:
        raise GcjaxError(f"{spec} has no field config.{path}; {nearest(path, known)}")
    points: Any = config.get("points", ())
    if points and all(path in dict(leaves(point)) for point in points):
        raise GcjaxError(f"config.{path}={text} would change nothing: every point of {spec} sets {path} itself")
    old: Any = get(config, path)
    value: Any = text
    if not isinstance(old, str):
        try:
            value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
        except (ValueError, SyntaxError):
            value = tuple(text.split(",")) if isinstance(old, tuple) else text
        if isinstance(old, tuple) and not isinstance(value, tuple):
            value = tuple(value) if isinstance(value, list) else (value,)
    strangers = old and isinstance(old, tuple) and not {type(item) for item in value} <= {type(item) for item in old}
    if isinstance(old, bool) is not isinstance(value, bool) or (value is None and old is not None) or strangers:
        raise GcjaxError(f"config.{path}={text} is not a {type(old).__name__}, as {old!r} is")
    try:
        put(config, path, value)
    except TypeError as error:
        raise GcjaxError(f"config.{path}={text} is not a {type(old).__name__}, as {old!r} is") from error


def leaves(config: Mapping[str, Any] | ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a nested config as (dotted path, value)."""
    for name, value in config.items():
        if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, (Mapping, ConfigDict)):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def get(config: Any, path: str) -> Any:
    """The value at a dotted path."""
    for name in path.split("."):
        config = config[name]
    return config


def put(config: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path; raises `TypeError` where a type-safe config holds another type there."""
    section, _, name = path.rpartition(".")
    (get(config, section) if section else config)[name] = value


def to_json(config: ConfigDict) -> str:
    """The whole config as JSON, for records; tuples become lists."""
    return json.dumps(config.to_dict(), indent=1)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two configs given as decoded JSON, as `path: old -> new`."""
    a, b = dict(leaves(old)), dict(leaves(new))
    missing = "(absent)"
    return [
        f"{path}: {a.get(path, missing)} -> {b.get(path, missing)}"
        for path in [*a, *(path for path in b if path not in a)]
        if a.get(path, missing) != b.get(path, missing)
    ]
