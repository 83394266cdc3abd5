"""Reads a YAML file, and writes each problem as one line for the user.

The line has the key's path in the file, the value and the fix. This module knows YAML and pydantic,
but not the meaning of the keys. It must never replace a wrong value by a default.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from disagg.errors import ConfigError
from disagg.redaction import hidden


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but it refuses a key that is given twice. PyYAML keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = getattr(key_node, "value", None)
            line = key_node.start_mark.line + 1
            if isinstance(key, str) and seen.setdefault(key, line) != line:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is already on line {seen[key]}; keep one of them",
                    problem_mark=key_node.start_mark,
                )
        return super().construct_mapping(node, deep)


def read_mapping(path: Path) -> dict[Any, Any]:
    """The file's keys and values. Raises ConfigError if the file is unreadable or no mapping."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a YAML file that can be read") from error
    return mapping_in(data, path)


def mapping_in(
    data: bytes, path: Path, example: str = "see serve_configs/cpu-1p1d.yaml for a small example"
) -> dict[Any, Any]:
    """The keys and values in a file's bytes. `example`: what to do if there are none. Raises
    ConfigError if they are no mapping."""
    try:
        content = yaml.load(data.decode(), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}); save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_problem(path, error)) from error
    except ValueError as error:  # PyYAML does not wrap all errors, for example of 2026-13-01
        raise ConfigError(f"{path}: {error}; put the value in quotes") from error
    if content is None:
        raise ConfigError(f"{path}: empty; {example}")
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: a {type(content).__name__}, not sections; start with 'model:' and, "
            "indented under it, 'path: …'"
        )
    return content


def _syntax_problem(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    words = getattr(error, "problem", None) or str(error)
    return f"{place}: not valid YAML: {' '.join(words.split())}"


def changed(content: Mapping[Any, Any], changes: Iterable[str]) -> dict[Any, Any]:
    """The content with changes such as `engine.args.dtype=float32`. A value is YAML; a number in
    the path is a place in a list. Raises ConfigError."""
    result = copy.deepcopy(dict(content))
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"--set: {change!r} — write KEY=VALUE, such as router.port=8001")
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set: {change!r} — the value is not valid YAML") from error
        *above, last = path.split(".")
        place: Any = result
        for key in above:
            place = _child(place, key, change)
        try:
            place[int(last) if isinstance(place, list) else last] = value
        except (ValueError, IndexError, TypeError) as error:
            raise _no_place(change, last) from error
    return result


def _child(place: Any, key: str, change: str) -> Any:
    """What has this key; a new section if there is none."""
    try:
        if isinstance(place, list):
            return place[int(key)]
        child = place.get(key)
        if child is None:
            child = place[key] = {}
        return child
    except (AttributeError, ValueError, IndexError) as error:
        raise _no_place(change, key) from error


def _no_place(change: str, key: str) -> ConfigError:
    return ConfigError(f"--set: {change!r} — there is no {key!r} in what the file has before it")


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line for each problem that pydantic found in the file that `model` describes."""
    return [_line(details, model) for details in error.errors()]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: the nearest known name, or all known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(names)}" if len(names) <= 12 else "no known name is similar"


def show(value: object, name: str = "") -> str:
    """A value in at most 60 characters, without credentials. name: its key in the file."""
    if value is None:
        return "empty"
    text = repr(hidden(value, name))
    return text if len(text) <= 60 else f"{text[:57]}…"


def _line(details: ErrorDetails, model: type[BaseModel]) -> str:
    loc = details["loc"]
    path = ".".join(str(part) for part in loc)
    kind = details["type"]
    if kind == "extra_forbidden":
        known = _section(model, loc[:-1]).model_fields
        return f"{path}: unknown key; {nearest(str(loc[-1]), known)}"
    if kind == "missing":
        return f"{path}: missing; set it"
    context: Mapping[str, Any] = details.get("ctx", {})
    words = _FIXES.get(kind)
    fix = words(context) if words else details["msg"].removeprefix("Value error, ")
    return f"{path}: {_shown(loc, details['input'])} — {fix}"


def _shown(loc: tuple[int | str, ...], value: object) -> str:
    """A wrong value, for the user. Of variables only their type: they may hold anything."""
    keys = [str(part) for part in loc]
    if "env" in keys and not isinstance(value, bool | int | float | None):
        return f"a {type(value).__name__}"
    return show(value, keys[-1] if "args" in keys else "")


def _section(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    for part in loc:
        if isinstance(part, int):
            continue  # an item of a list, whose section was found with the list
        annotation = model.model_fields[part].annotation
        kinds = get_args(annotation) or (annotation,)  # a section that may be missing is a union
        model = next(k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel))
    return model


def _whole_number(_: Mapping[str, Any]) -> str:
    return "must be a whole number, without quotes"


def _number(_: Mapping[str, Any]) -> str:
    return "must be a finite number, without quotes"


def _flag(_: Mapping[str, Any]) -> str:
    return "must be true or false"


def _text(_: Mapping[str, Any]) -> str:
    return "must be text; put it in quotes"


def _mapping(_: Mapping[str, Any]) -> str:
    return "must be keys with values, indented under it; remove the line to take the defaults"


_FIXES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda c: f"must be at least {c['ge']:g}; set {c['ge']:g} or more",
    "greater_than": lambda c: f"must be more than {c['gt']:g}; set a larger value",
    "less_than_equal": lambda c: f"must be at most {c['le']:g}; set {c['le']:g} or less",
    "int_type": _whole_number,
    "int_parsing": _whole_number,
    "int_from_float": _whole_number,
    "float_type": _number,
    "float_parsing": _number,
    "finite_number": _number,
    "bool_type": _flag,
    "bool_parsing": _flag,
    "string_type": _text,
    "path_type": _text,
    "string_too_short": lambda _: "must not be empty; set it",
    "string_pattern_mismatch": lambda c: f"must match {c['pattern']}; choose another",
    "literal_error": lambda c: f"must be {c['expected']}",
    "list_type": lambda _: "must be a list, like [one, two]",
    "too_short": lambda c: f"must name at least {c['min_length']}",
    "dict_type": _mapping,
    "model_type": _mapping,
    "model_attributes_type": _mapping,
}
