"""What a group says when it is made."""

from __future__ import annotations

import pytest

from disagg.config import PairingSection, PolicyName, RouterSection
from disagg.router.caches import block_keys
from disagg.router.server.model_group import ModelGroup


@pytest.mark.parametrize("policy", ["cache_aware", "prefix_affinity"])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_slow_keys_are_told_where_they_are_used(
    policy: PolicyName,
    is_compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(block_keys, "is_compiled", is_compiled)
    settings = RouterSection(pairing=PairingSection(prefill=policy))
    ModelGroup("", settings, [], {}, connector="disagg", strict=False)
    is_told = "install a C compiler" in caplog.text
    assert is_told == (policy == "cache_aware" and not is_compiled)
