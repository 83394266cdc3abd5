"""For clients: wait for a request's hidden states, read them, remove them.

Needs torch and access to the folder, on the engine's host or on one that shares the file system
with working locks. It must never return an incomplete file, or wait for a dead writer.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from disagg.connector.hidden_states import naming, pending_writes
from disagg.errors import HiddenStatesFailed, HiddenStatesLost, HiddenStatesTimeout
from disagg.private_files import open_regular

if TYPE_CHECKING:
    import torch

DEFAULT_TIMEOUT_S = 60.0
_LONGEST_ERROR = 4096


def load_hidden_states(
    path: str | os.PathLike[str], timeout: float | None = DEFAULT_TIMEOUT_S
) -> dict[str, torch.Tensor]:
    """Wait for one request's states, and read them.

    path: `hidden_states_path` of an answer's `kv_transfer_params`.
    timeout: seconds to wait for the writer; None waits as long as it lives.

    Returns `hidden_states` [num_tokens, num_hidden_states, hidden_size] in the model's dtype and
    `token_ids` [num_tokens] (int64), on the CPU.

    Raises HiddenStatesTimeout when the writer is still at work after `timeout` seconds,
    HiddenStatesFailed with the writer's reason when it could not write, HiddenStatesLost when it
    died, ValueError for a path that is not a HiddenStatesConnector's.
    """
    written = naming.parse(path)
    _await(written, timeout)
    from disagg.connector.hidden_states import tensor_file  # torch takes seconds to import

    try:
        return tensor_file.read(written.path)
    except FileNotFoundError as error:
        raise HiddenStatesLost(f"{written.path}: was removed while it was read") from error


def cleanup_hidden_states(
    path: str | os.PathLike[str],
    keep_hidden_states: bool = False,
    timeout: float | None = DEFAULT_TIMEOUT_S,
) -> None:
    """Remove a request's file and its error file; missing files are ignored.

    keep_hidden_states: keep the states file.
    timeout: seconds to wait for a writer that is still at work, as it would write the file
    afterwards; then raises HiddenStatesTimeout.
    """
    written = naming.parse(path)
    try:
        _await(written, timeout)
    except (HiddenStatesFailed, HiddenStatesLost):
        pass  # there is an error file at most
    for path in (written.error,) if keep_hidden_states else (written.error, written.path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def _await(written: naming.Written, timeout: float | None) -> None:
    """Return when the file is complete; raise when it never will be."""
    path = written.path
    if path.exists():
        return  # it is complete under this name
    try:
        ended = pending_writes.wait(written.lock, written.number, timeout)
    except (FileNotFoundError, NotADirectoryError):
        ended = True  # no writer or no folder: nothing more will be written
    if not ended:
        raise HiddenStatesTimeout(
            f"{path}: not written within {timeout:g} s; its writer is still at work — "
            "wait longer, or look at the engine's disk"
        )
    if path.exists():
        return
    reason = _reason(written.error)
    if reason is not None:
        raise HiddenStatesFailed(f"{path}: could not be written: {reason}")
    if pending_writes.is_alive(written.lock):
        raise HiddenStatesFailed(
            f"{path}: does not exist, although its writer is done: it was removed already, "
            "or neither it nor the reason could be written; the engine's log says which"
        )
    raise HiddenStatesLost(
        f"{path}: its writer ended before it was written, or its folder was removed; send the "
        "request again"
    )


def _reason(path: Path) -> str | None:
    try:
        with open(open_regular(path), encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST_ERROR).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
