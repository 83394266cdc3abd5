"""Checks of single engine arguments: names, types, bounds, vLLM's registered names, files.

Each check yields one line per problem: the key's path in the file, the value, the fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from disagg.config import is_local
from disagg.config_file import nearest, show
from disagg.engine.args import keys_of
from disagg.preflight import vllm_args, vllm_source
from disagg.preflight.vllm_args import ArgType, Keys

_RANKS = "set data_parallel_size; each rank gets its own"
_OWNED = {
    "api_key": "set router.api_keys_env or router.api_keys_file",
    "grpc_port": "remove it; engines serve HTTP on a port that they choose",
    "host": "set router.host; engines choose their own address",
    "kv_transfer_config": "set the keys of the transfer section",
    "model": "set model.path",
    "port": "set router.port; engines choose their own ports",
    "revision": "set model.revision",
    "served_model_name": "set model.served_name",
    "ssl_certfile": "set router.tls_cert_file; engines serve http, to the router only",
    "ssl_keyfile": "set router.tls_key_file; engines serve http, to the router only",
    "tokenizer": "set model.tokenizer",
    "trust_remote_code": "set model.trust_remote_code",
    "uds": "remove it; engines serve HTTP on a port that they choose",
}
# Owned too, but these values of vLLM's change nothing.
_OWNED_UNLESS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "data_parallel_address": ((None,), _RANKS),
    "data_parallel_external_lb": ((None, False), _RANKS),
    "data_parallel_hybrid_lb": ((None, False), _RANKS),
    "data_parallel_multi_port_external_lb": ((None, False), _RANKS),
    "data_parallel_rank": ((None,), _RANKS),
    "data_parallel_rpc_port": ((None,), _RANKS),
    "data_parallel_size_local": ((None, 1), _RANKS),
    "data_parallel_start_rank": ((None, 0), _RANKS),
    "data_parallel_backend": ((None, "mp"), "remove it; Ray places each rank as an engine"),
    "enable_elastic_ep": ((None, False), "remove it; scale replicas, whose groups are whole"),
    "kv_offloading_size": ((None,), "set tiers.host.max_bytes"),
    "nnodes": ((None, 1), "set distributed_executor_backend: ray, and num_gpus for all ranks"),
}
_NO_CHANGE = object()
_FOLDED = {"attention_backend": str.upper, "load_format": str.lower, "quantization": str.lower}
_PLUGINS = {"tool_call_parser": "tool_parser_plugin", "reasoning_parser": "reasoning_parser_plugin"}
_FILES = ("tool_parser_plugin", "reasoning_parser_plugin")
_TEMPLATE_CHARACTERS = "{}\n"  # vllm/renderers/chat_utils.py: with one, it is no path
_TEMPLATES = "transformers_utils/chat_templates"


def argument_problems(
    path: str, args: Mapping[str, Any], known: Mapping[str, ArgType] | None
) -> Iterator[str]:
    """Of one section. `known` None (vLLM is not installed): only what disagg itself decides."""
    for name, value in args.items():
        key = f"{path}.{name}"
        unless, fix = _OWNED_UNLESS.get(name, ((_NO_CHANGE,), _OWNED.get(name)))
        if fix is not None and value not in unless:
            yield f"{key}: {show(value, name)} — set by disagg; {fix}"
        elif known is None or value is None:
            continue
        elif name not in known:
            yield f"{key}: vLLM has no such argument; {nearest(name, known)}"
        elif not known[name].accepts(value, name):
            yield f"{key}: {show(value, name)} — must be {known[name]}"
        else:
            yield from _bounds_problem(key, name, value, vllm_args.bounds(name))
            yield from _name_problem(key, name, value, args)
            yield from _file_problem(key, name, value)
            if name == "hf_overrides" and keys_of(value) is None:
                yield f"{key}: {show(value)} — must be keys with values"
            if (keys := vllm_args.keys_of_class(name)) is not None:
                yield from _keys_problems(key, value, keys)


def _bounds_problem(key: str, name: str, value: Any, limits: Mapping[str, float]) -> Iterator[str]:
    if name == "block_size":
        return  # `pool_checks` knows more about it
    number = vllm_args.as_number(name, value)
    if limits and number is not None and (words := vllm_args.out_of_bounds(number, limits)):
        yield f"{key}: {show(value)} — must be {words}"


def _name_problem(key: str, name: str, value: Any, args: Mapping[str, Any]) -> Iterator[str]:
    names = vllm_args.known_names(name)
    if names is None or not isinstance(value, str) or not value or args.get(_PLUGINS.get(name, "")):
        return
    if _FOLDED.get(name, str)(value) not in names:
        yield f"{key}: {show(value)} — this vLLM knows none of this name; {nearest(value, names)}"


def _keys_problems(key: str, value: Any, keys: Keys) -> Iterator[str]:
    given = keys_of(value)
    if given is None:
        if not isinstance(value, str) or not value.lstrip().startswith("{"):
            yield f"{key}: {show(value)} — must be keys with values"
        return  # JSON with numbers such as 80m, which vLLM reads
    for name, inner in given.items():
        if name not in keys.types:
            if keys.is_closed:
                yield f"{key}.{name}: vLLM has no such key; {nearest(str(name), keys.types)}"
            continue
        words = keys.types[name].words
        if words and isinstance(inner, str) and not keys.types[name].accepts(inner):
            fix = f"must be {keys.types[name]}" if len(words) <= 12 else nearest(inner, words)
            yield f"{key}.{name}: {show(inner, name)} — {fix}"
        yield from _bounds_problem(f"{key}.{name}", name, inner, keys.bounds.get(name, {}))


def _file_problem(key: str, name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, str) or not value:
        return
    if name in _FILES and not Path(value).is_file():
        yield f"{key}: {show(value)} — no such file; correct it"
    elif name == "chat_template" and not any(sign in value for sign in _TEMPLATE_CHARACTERS):
        if not _is_template(value):
            yield f"{key}: {show(value)} — no such file; correct it, or write the template itself"
    elif name == "generation_config" and value not in ("auto", "vllm"):
        if is_local(value) and not (Path(value) / "generation_config.json").is_file():
            yield (
                f"{key}: {show(value)} — holds no generation_config.json; name a folder that does, "
                "auto or vllm"
            )


def _is_template(value: str) -> bool:
    package = vllm_source.root()
    builtin = package is not None and (package / _TEMPLATES / value).is_file()
    return builtin or Path(value).is_file()
