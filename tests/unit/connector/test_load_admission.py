"""Loads leave enough blocks for earlier loads: vLLM's scheduler with hardly a block to spare."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.connector.modelless import BLOCK, Layers, answer, run
from unit.connector.offload.test_modelless import Start, ask, prompt_of, start

pytestmark = pytest.mark.usefixtures("distributed")
__all__ = ["start"]

WINDOW = (Layers(window=3 * BLOCK + 1),)


@pytest.mark.parametrize("requests", [2, 3])
def test_loads_do_not_wait_for_each_other(start: Start, tmp_path: Path, requests: int) -> None:
    """Of each prompt, three blocks are loaded and one is to be computed; there are six."""
    whole = start(groups=WINDOW, directory=str(tmp_path))
    prompts = [prompt_of(9 * BLOCK + 20, seed=n) for n in range(requests)]
    for prompt in prompts:
        ask(whole, prompt)
    small = start(groups=WINDOW, directory=str(tmp_path), blocks=1 + 6)
    asked = {small.add(prompt, 4, None): prompt for prompt in prompts}
    run([small], lambda: set(asked) <= set(small.finished) and small.is_idle())
    for name, prompt in asked.items():
        assert small.answers[name] == answer(prompt, 4, WINDOW)
    loads = [load for step in small.scheduled for load in step.kv_connector_metadata.loads]
    assert [len(load.fillings[0].block_ids) for load in loads] == [3] * requests
