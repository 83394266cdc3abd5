"""What clients may send and what they get, as an OpenAPI description.

Says what the router itself reads and answers. Everything else in a body is vLLM's and goes through
untouched, so it is allowed and not described; the router must never check a request by this.
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
# Of both kinds of completion. A request may have more: all that vLLM knows.
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
    "kv_transfer_params": {"description": "Dropped: only the router speaks of transfers."},
}
_PROMPT = {
    "description": "A text, token ids, or several of either.",
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
    "404": "No such model.",
    "408": "The request did not arrive in time.",
    "413": "The body is larger than router.limits.max_body_bytes.",
    "422": "An engine refuses the request.",
    "429": "Too many requests at once; Retry-After says when to come again.",
    "500": "The request failed at an engine, or in the router.",
    "502": "An engine's answer broke off.",
    "503": "No engine can be reached, or the router ends.",
    "504": "An engine gave no answer in time.",
}
_OVERVIEW = (
    "An OpenAI endpoint in front of prefill and decode engines, and Anthropic's messages. Other "
    "paths, such as /v1/embeddings, go to a decode engine as they are; vLLM describes them."
)


def document() -> dict[str, Any]:
    """The description, OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
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
                "post": _asked("Response", {"input": {}, "max_output_tokens": _INTEGER})
            },
            "/v1/messages": {"post": _asked("Message", {"messages": {}, "max_tokens": _INTEGER})},
            "/v1/models": {"get": _operation("The models served", _json({"type": "object"}))},
            "/health": {"get": _own("The router runs")},
            "/ready": {"get": _ready()},
            "/ui": {"get": _own("A page of how things stand", {"text/html": {}})},
            "/ui/state": {"get": _own("What the page shows", _json({"type": "object"}))},
            "/metrics": {"get": _own("Figures for Prometheus", {"text/plain": {}})},
        },
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _completion(summary: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return _asked(summary, {**_SAMPLING, **properties}, required)


def _asked(
    summary: str, properties: dict[str, Any], required: Sequence[str] = ()
) -> dict[str, Any]:
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


def _own(summary: str, answer: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the router answers by itself, to anybody."""
    found = {"description": "As ever."} | ({"content": answer} if answer else {})
    return {"summary": summary, "responses": {"200": found}}


def _ready() -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": ["ready"],
        "properties": {"ready": {"type": "boolean"}, "engines": {"type": "object"}},
    }
    said = {"content": _json(schema)}
    return {
        "summary": "Requests can be served",
        "responses": {
            "200": {"description": "They can.", **said},
            "503": {"description": "They cannot, and why.", **said},
        },
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
