"""How the connectors of `disagg bench faults` are configured, without engines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from disagg.chaos.faults.connectors import CONNECTORS, REQUEST_ID, _wait_for_port
from disagg.errors import StartupError
from disagg.testing.ports import free_port

KNOWN = {connector.name: connector for connector in CONNECTORS}


def test_both_legs_of_a_push_have_one_request_id() -> None:
    push = KNOWN["NixlPushConnector"]
    asked, other = push.prefill(), push.prefill()
    params = push.decode({}, asked, {"do_remote_prefill": True})
    assert params == {"do_remote_prefill": True, REQUEST_ID: asked[REQUEST_ID]}
    assert asked[REQUEST_ID] != other[REQUEST_ID]
    assert push.decode({}, asked, None) is None


def test_a_connector_whose_package_is_missing_says_so() -> None:
    for connector in CONNECTORS:
        reason = f"{connector.distribution} is not installed"
        assert connector.missing in (None, reason)


def test_a_server_beside_the_engines_that_ends_is_an_error_at_once() -> None:
    server = subprocess.Popen([sys.executable, "-c", ""])
    with server, pytest.raises(StartupError, match="does not listen"):
        _wait_for_port(free_port(), server)
