"""Why an engine ended, from its log."""

from __future__ import annotations

import pytest

from disagg.engine import logs

CLIENT = """\
(APIServer pid=7) ERROR 11-20 22:00:00 [serving.py:99] Error in preprocessing prompt inputs
(APIServer pid=7) ERROR 11-20 22:00:00 [serving.py:99] Traceback (most recent call last):
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
(Worker pid=9) WARNING 11-20 22:10:00 [blocks.py:12] a load failed
ConnectionResetError: [Errno 104] Connection reset by peer
"""
FATAL = """\
(EngineCore pid=8) ERROR 11-20 23:00:00 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=8) ERROR 11-20 23:00:00 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-20 23:00:00 [core.py:1512] RuntimeError: out of blocks
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (CLIENT + FATAL, "RuntimeError: out of blocks"),
        (FATAL, "RuntimeError: out of blocks"),
        (CLIENT, None),
        (CLIENT + "Fatal Python error: Aborted\n", "Fatal Python error: Aborted"),
        (
            CLIENT + "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), ends\n",
            "Worker proc VllmWorker-1 died unexpectedly",
        ),
    ],
)  # fmt: skip
def test_a_death_is_not_blamed_on_a_clients_mistake(log: str, cause: str | None) -> None:
    assert logs.root_cause(log, served=True) == cause


def test_an_engine_that_did_not_start_names_its_first_error() -> None:
    log = """\
(Worker pid=9) ERROR 11-20 22:00:00 [worker.py:1] WorkerProc failed to start.
(Worker pid=9) ERROR 11-20 22:00:00 [worker.py:1] ValueError: 3 heads cannot be split
(EngineCore pid=8) ERROR 11-20 22:00:01 [core.py:9] EngineCore failed to start.
RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert logs.root_cause(log) == "3 heads cannot be split"
