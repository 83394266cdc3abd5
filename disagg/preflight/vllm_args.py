"""The installed vLLM's arguments: names, types and bounds, read from its source.

vLLM itself checks an argument whose type is not plain, and all that only its own code can know.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from disagg.preflight import vllm_source
from disagg.preflight.vllm_source import ConfigClass, Field, Source
from disagg.vllm_compat import server

# The files that define them, relative to vLLM's package folder.
_CLASSES = (
    ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")),
    (server.argument_file(), ("BaseFrontendArgs", "FrontendArgs")),
)
_PLAIN = {"bool", "int", "float", "str", "list", "dict", "set"}
# Arguments that name no default of a class, but are fields of one of these.
_ALSO = ("CacheConfig", "SchedulerConfig")
# Numbers that vLLM's command line takes with a suffix (`_compute_kwargs` of engine/arg_utils.py).
_SIZES = {
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_queued_tokens",
    "max_num_scheduled_tokens",
    "safetensors_prefetch_block_size",
}
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")

# Registries of vLLM: the file and the name of each, and names that it has besides.
_REGISTRIES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "attention_backend": ("v1/attention/backends/registry.py", "AttentionBackendEnum", ()),
    "config_format": ("transformers_utils/config.py", "ConfigFormat", ()),
    "load_format": ("model_executor/model_loader/__init__.py", "LoadFormats", ()),
    "quantization": (
        "model_executor/layers/quantization/__init__.py",
        "QuantizationMethods",
        (),
    ),
    "reasoning_parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER", ()),
    "tokenizer_mode": ("tokenizers/registry.py", "_VLLM_TOKENIZERS", ("auto",)),
    "tool_call_parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER", ()),
}


class ArgType(NamedTuple):
    """The values that an argument may have, as far as its annotation is a plain type."""

    plain: frozenset[str]
    """Names of Python types."""
    words: tuple[Any, ...]
    """Values of a `Literal`."""
    open: bool
    """Whether it may have other values, too, which only vLLM can check."""

    def accepts(self, value: Any, name: str = "") -> bool:
        """False only if the value is certainly wrong. name: the argument's."""
        if self.open or value is None or value in self.words:
            return True
        if isinstance(value, bool):
            return "bool" in self.plain
        if isinstance(value, int):
            return bool(self.plain & {"int", "float"})
        if isinstance(value, float):
            return "float" in self.plain
        if isinstance(value, str):
            return "str" in self.plain or self._accepts_text(value, name)
        if isinstance(value, list):
            return bool(self.plain & {"list", "set"})
        return "dict" in self.plain

    def _accepts_text(self, text: str, name: str) -> bool:
        if "dict" in self.plain and text.lstrip().startswith("{"):
            return True  # JSON, as on the command line
        return bool(self.plain & {"int", "float"}) and as_number(name, text) is not None

    def __str__(self) -> str:
        kinds = [_WORDS[name] for name in sorted(self.plain)]
        if self.words:
            kinds.append("one of " + ", ".join(map(str, self.words)))
        return " or ".join(kinds)


_WORDS = {
    "bool": "true or false",
    "dict": "keys with values",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "set": "a list",
    "str": "text",
}
_BOUNDS: Mapping[str, tuple[Callable[[float, float], bool], str]] = {
    "gt": (operator.gt, "more than"),
    "ge": (operator.ge, "at least"),
    "lt": (operator.lt, "less than"),
    "le": (operator.le, "at most"),
}


def as_number(name: str, value: Any) -> float | None:
    """The number that vLLM's command line reads for an argument: 16k is 16,000, 16K is 16,384, and
    auto is -1. None: no number, which vLLM refuses."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if not isinstance(value, str):
        return None
    if name == "max_model_len" and value.strip().lower() == "auto":
        return -1
    if name in _SIZES and (found := _SIZE.fullmatch(value.strip())):
        return int(float(found[1]) * _SUFFIXES.get(found[2], 1))
    try:
        return float(value)
    except ValueError:
        return None


@dataclass(frozen=True)
class Keys:
    """The keys of an argument that is a configuration class of vLLM's."""

    types: Mapping[str, ArgType]
    bounds: Mapping[str, Mapping[str, float]]
    is_closed: bool
    """Whether vLLM refuses other keys."""


@cache
def known_arguments() -> Mapping[str, ArgType] | None:
    """vLLM's engine and server arguments by name; None if vLLM or its source is not installed."""
    fields = _fields()
    if fields is None:
        return None
    return {name: _type(field.source, field.annotation) for name, field in fields.items()} or None


@cache
def known_names(argument: str) -> frozenset[str] | None:
    """All values of an argument that vLLM looks up by name; None if they are not known here."""
    package = vllm_source.root()
    if package is None or argument not in _REGISTRIES or vllm_source.has_other_plugins():
        return None
    file, symbol, more = _REGISTRIES[argument]
    source = vllm_source.source(package / file)
    names = source.names(symbol) if source else ()
    return frozenset((*names, *more)) if names else None


@cache
def bounds(argument: str) -> Mapping[str, float]:
    """The bounds of a number, from the class of vLLM's that takes it."""
    field = (_fields() or {}).get(argument)
    if field is None:
        return {}
    match field.default:
        case ast.Attribute(value=ast.Name(id=name), attr=key):
            return _bounds_of(field.source, name, key)
        case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=name), ast.Constant(key)]):
            return _bounds_of(field.source, name, str(key))
        case ast.Constant(value=None):
            found = (_bounds_of(field.source, name, argument) for name in _ALSO)
            return next(filter(None, found), {})
    return {}


@cache
def keys_of_class(argument: str) -> Keys | None:
    """The keys of an argument that is one of vLLM's configuration classes; None for others."""
    field = (_fields() or {}).get(argument)
    if field is None:
        return None
    if argument == "speculative_config":  # annotated as a plain dictionary
        found = _class(field.source, "SpeculativeConfig")
    else:
        parts = [part for part in _union(field.annotation) if not _is_none(part)]
        single = parts[0] if len(parts) == 1 else None
        found = _class(field.source, single.id) if isinstance(single, ast.Name) else None
    if found is None or not found.fields:
        return None
    open_ = ArgType(frozenset(), (), True)
    return Keys(
        {
            name: open_ if name in found.converted else _type(field.source, field.annotation)
            for name, field in found.fields.items()
            if not name.startswith("_")
        },
        {
            name: vllm_source.limits(field)
            for name, field in found.fields.items()
            if name not in found.converted
        },
        found.is_closed,
    )


def out_of_bounds(value: float, limits: Mapping[str, float]) -> str | None:
    """The bounds in words, if the value is outside of them."""
    if all(_BOUNDS[kind][0](value, limit) for kind, limit in limits.items()):
        return None
    return " and ".join(f"{_BOUNDS[kind][1]} {limit:g}" for kind, limit in limits.items())


@cache
def _fields() -> Mapping[str, Field] | None:
    package = vllm_source.root()
    if package is None:
        return None
    known: dict[str, Field] = {}
    for file, classes in _CLASSES:
        source = vllm_source.source(package / file)
        if source is None:
            return None
        for name in classes:
            found = _class(source, name)
            known |= found.fields if found else {}
    return {name: field for name, field in known.items() if not name.startswith("_")}


@cache
def _class(source: Source, name: str) -> ConfigClass | None:
    found = source.definition(name)
    if found is None and (package := vllm_source.root()) is not None:
        config = vllm_source.source(package / "config/__init__.py")
        found = config.definition(name) if config else None
    return ConfigClass(found) if found and isinstance(found.node, ast.ClassDef) else None


def _bounds_of(source: Source, class_name: str, key: str) -> Mapping[str, float]:
    found = _class(source, class_name)
    if found is None or key not in found.fields or key in found.converted:
        return {}
    return vllm_source.limits(found.fields[key])


def _type(source: Source, node: ast.expr) -> ArgType:
    parts = [_atom(source, part) for part in _union(node)]
    return ArgType(
        frozenset().union(*(part.plain for part in parts)),
        tuple(word for part in parts for word in part.words),
        any(part.open for part in parts),
    )


def _atom(source: Source, node: ast.expr) -> ArgType:
    if _is_none(node):
        return ArgType(frozenset(), (), False)
    head = node.value if isinstance(node, ast.Subscript) else node
    if not isinstance(head, ast.Name):
        return ArgType(frozenset(), (), True)
    if head.id in _PLAIN:
        return ArgType(frozenset({head.id}), (), False)
    words = source.literal(node)
    return ArgType(frozenset(), words, not words)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _union(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _union(node.left)
        yield from _union(node.right)
    else:
        yield node
