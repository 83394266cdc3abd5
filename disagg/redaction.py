"""Hides credentials in what is printed of a configuration: variables, arguments and URLs.

Whatever prints an environment or the arguments of an engine passes it through `hidden` first. A
name decides whether its value is hidden; too much is hidden rather than too little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"

_WORD = re.compile(r"[A-Z0-9]+")
_WITHIN = ("SECRET", "PASSW", "CREDENTIAL", "COOKIE", "BEARER", "APIKEY")
_ENDS = ("TOKEN", "KEY", "KEYS", "AUTH", "DSN", "PASS", "PWD", "PASSPHRASE", "SIGNATURE")
_USER = re.compile(r"(?<=://)\S*@")  # a password may have a slash in it
_PARAMETER = re.compile(
    r"([\w.-]*(?:token|key|secret|passw(?:or)?d|pwd|passphrase|sig|signature|credential)s?=)"
    r"[^&;,\s]+",
    re.IGNORECASE,
)


def is_credential(name: str) -> bool:
    """Whether a variable or argument of this name holds a credential, by its words."""
    return any(
        any(part in word for part in _WITHIN) or word.endswith(_ENDS)
        for word in _WORD.findall(name.upper())
    )


def hidden(value: Any, name: str = "") -> Any:
    """The value with its credentials hidden: all of it if the name says so; else those inside of
    mappings and lists, the user of a URL, and parameters such as `password=`."""
    if value is None or isinstance(value, bool | int | float):
        # Models have numbers such as `num_key_value_heads` and `eos_token_id`.
        return HIDDEN if any(part in name.upper() for part in _WITHIN) else value
    # `MAX_TOKENS` counts tokens, `API_TOKENS` holds some.
    counts = isinstance(value, str) and value.strip().isdigit()
    if is_credential(name) or (name.upper().endswith("TOKENS") and not counts):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: hidden(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(inner) for inner in value]
    if isinstance(value, str):
        return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", value))
    return value
