"""Every error that disagg raises on purpose.

    DisaggError                 base; its text is written for the person who runs the system
    ├── ConfigError             the YAML or a command line option is wrong (exit status 2)
    ├── StartupError            an engine, Ray or the router did not come up
    ├── TransferError           bytes of a handoff did not arrive; `reason` is a metric label
    │   ├── LeaseGone           the producer no longer keeps the blocks
    │   ├── PeerRefused         hello failed: other model, layout, secret or version
    │   ├── PeerLost            connection refused, reset, or silent past the deadline
    │   └── DataCorrupt         size, fingerprint or checksum of what arrived is wrong
    └── HiddenStatesError       a request's hidden states are not available
        ├── HiddenStatesTimeout the writer lives but has not finished in time; a TimeoutError too
        ├── HiddenStatesFailed  the writer could not write them; the message has the reason
        └── HiddenStatesLost    the writer died before it wrote them

A TransferError never reaches a client: the decode engine then computes the prompt itself.
"""

from __future__ import annotations


class DisaggError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DisaggError):
    """The configuration is wrong. `problems` holds one line for each problem."""

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class StartupError(DisaggError):
    """Something did not start. `log_tail` holds the last lines of its own log."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        self.log_tail = log_tail
        super().__init__(message)
        if log_tail:
            self.add_note(log_tail)  # a traceback shows it


class TransferError(DisaggError):
    """A handoff's bytes did not arrive. `reason` labels `disagg_kv_load_failures_total`."""

    reason = "transfer"

    def __init__(self, message: str, reason: str | None = None) -> None:
        if reason is not None:
            self.reason = reason
        super().__init__(message)


class LeaseGone(TransferError):
    """The producer released, expired or never had the lease."""

    reason = "lease_gone"


class PeerRefused(TransferError):
    """This worker does not exchange blocks with the peer; the message names the field."""

    reason = "refused"


class PeerLost(TransferError):
    """The peer's connection failed or stayed silent past the deadline."""

    reason = "peer_lost"


class DataCorrupt(TransferError):
    """The received bytes are not the sent bytes."""

    reason = "corrupt"


class HiddenStatesError(DisaggError):
    """A request's hidden states are not available."""


class HiddenStatesTimeout(HiddenStatesError, TimeoutError):
    """The writer had not finished when the timeout ended."""


class HiddenStatesFailed(HiddenStatesError):
    """The writer could not write them; the message has the reason."""


class HiddenStatesLost(HiddenStatesError):
    """The writer ended before it wrote them."""
