"""The router's API as an OpenAPI description.

It describes the fields that the router itself reads and answers. All other fields of a body belong
to vLLM and pass through unchanged: they are allowed, but not described. The router must never
validate a request against this description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg import __version__

PATH = "/openapi.json"
_INTEGER: dict[str, Any] = {"type": ["integer", "null"]}
_NUMBER: dict[str, Any] = {"type": ["number", "null"]}
_BOOLEAN: dict[str, Any] = {"type": ["boolean", "null"]}
_TOKENS = {"type": "array", "items": {"type": "integer"}}
# For completions and chats. A request may have any other field that vLLM knows.
_SAMPLING: dict[str, Any] = {
    "model": {"type": "string", "description": "The served name; engines answer 404 to another."},
    "max_tokens": _INTEGER,
    "n": _INTEGER,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "seed": _INTEGER,
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "stream": {**_BOOLEAN, "description": "Answer with server-sent events."},
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _BOOLEAN},
    },
    "kv_transfer_params": {"description": "Dropped: only the router sets transfer params."},
}
_PROMPT = {
    "description": "A text, a list of token ids, or a list of either.",
    "anyOf": [
        {"type": "string"},
        _TOKENS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKENS]}},
    ],
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {
            "anyOf": [
                {"type": ["string", "null"]},
                {"type": "array", "items": {"type": "object"}},
            ]
        },
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {},
                "code": {},
            },
        }
    },
}
_ERRORS = {
    "400": "The request is wrong.",
    "401": "No API key, or a wrong one.",
    "403": "The path is for operators: it needs an admin key.",
    "404": "No such model.",
    "408": "The request did not arrive in time.",
    "413": "The body is larger than router.limits.max_body_bytes, or has more values than "
    "max_json_elements.",
    "422": "An engine refuses the request.",
    "429": "Too many requests at once; Retry-After says when to try again.",
    "500": "The request failed at an engine, or in the router.",
    "502": "An engine's answer broke off.",
    "503": "No engine can be reached, the router is shutting down, or it holds as many bytes of "
    "requests as it may.",
    "504": "An engine gave no answer in time.",
}
_OVERVIEW = (
    "An OpenAI and Anthropic Messages endpoint in front of prefill and decode engines. Other "
    "paths, such as /v1/embeddings, go to a decode engine unchanged; vLLM describes them."
)


def document(root_path: str = "") -> dict[str, Any]:
    """The description, OpenAPI 3.1. `root_path`: where a proxy publishes the router."""
    return {
        "openapi": "3.1.0",
        "servers": [{"url": root_path or "/"}],
        "info": {"title": "disagg", "version": __version__, "description": _OVERVIEW},
        "paths": {
            "/v1/completions": {"post": _completion("Completion", {"prompt": _PROMPT}, [])},
            "/v1/chat/completions": {
                "post": _completion(
                    "Chat completion",
                    {
                        "messages": {"type": "array", "items": _MESSAGE},
                        "max_completion_tokens": _INTEGER,
                    },
                    ["messages"],
                )
            },
            "/v1/responses": {
                "post": _post("Response", {"input": {}, "max_output_tokens": _INTEGER})
            },
            "/v1/messages": {"post": _post("Message", {"messages": {}, "max_tokens": _INTEGER})},
            "/v1/models": {"get": _operation("The models served", _json({"type": "object"}))},
            "/health": {"get": _public("The router runs")},
            "/ready": {"get": _ready()},
            "/ui": {"get": _public("Status page", {"text/html": {}})},
            "/ui/state": {"get": _state()},
            "/metrics": {"get": _public("Prometheus metrics", {"text/plain": {}})},
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _completion(summary: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return _post(summary, {**_SAMPLING, **properties}, required)


def _post(summary: str, properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": True,
    }
    answer = {**_json({"type": "object"}), "text/event-stream": {}}
    return {
        **_operation(summary, answer),
        "requestBody": {"required": True, "content": _json(schema)},
    }


def _operation(summary: str, answer: dict[str, Any]) -> dict[str, Any]:
    failed = _json({"$ref": "#/components/schemas/Error"})
    errors = {status: {"description": text, "content": failed} for status, text in _ERRORS.items()}
    return {
        "summary": summary,
        "security": [{}, {"key": []}],
        "responses": {"200": {"description": "The answer.", "content": answer}, **errors},
    }


def _public(summary: str, answer: dict[str, Any] | None = None) -> dict[str, Any]:
    """A route that the router answers itself, without an API key."""
    success = {"description": "OK."} | ({"content": answer} if answer else {})
    return {"summary": summary, "responses": {"200": success}}


def _state() -> dict[str, Any]:
    words = "Also the history after this time, in seconds since 1970; 0 for ten minutes."
    since = {"name": "since", "in": "query", "schema": {"type": "number"}, "description": words}
    answer = _public("The data of the status page", _json({"type": "object"}))
    return {**answer, "parameters": [since]}


def _ready() -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": ["ready"],
        "properties": {"ready": {"type": "boolean"}, "engines": {"type": "object"}},
    }
    answer = {"content": _json(schema)}
    return {
        "summary": "Requests can be served",
        "responses": {
            "200": {"description": "They can.", **answer},
            "503": {"description": "They cannot, and why.", **answer},
        },
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
