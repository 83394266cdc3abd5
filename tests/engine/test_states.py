"""Models with recurrent state beside attention: Mamba layers, and Qwen3-Next's linear attention.

A state is that behind some token and no other, so prefill stops before a prompt's last one, which
decode computes. The engines are these tests' own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import StartupError
from disagg.router.api.bodies import PARAMS, REMOTE_DECODE_AND_TOKEN
from disagg.testing.vllm_server import VllmServer, completion, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import begun, beside, lengths, routed, running, tiers, transfer
from engine.engines_with_tiers import ANSWER, EnginesWithTiers
from engine.followed import check_followed
from engine.streams import Streamed, stream
from engine.test_soak import check_under_sabotage
from engine.windows import PAGE, STATES, make_gated_deltas, make_states

Prompt = Callable[[int], list[int]]
BLOCK, LEASE_S = 256, 3.0
PATH = "/v1/completions"
# More than a block at once: vLLM 0.32 alone goes over a block's end then, on a CPU.
STEPS = ("--max-num-batched-tokens", str(BLOCK + BLOCK // 2), "--max-num-seqs", "16")
ONE_PAGE = ("--no-enable-prefix-caching",)


@dataclass(frozen=True)
class Three:
    """prefill, decode: with the connector. single: plain vLLM, without prefix caching.

    `tiered`: whether both have tiers beside it, in one folder. `goes_on`: whether loads begin
    behind what decode has of attention, without a state.
    """

    prefill: VllmServer
    decode: VllmServer
    single: VllmServer
    tiered: bool = False
    goes_on: bool = False

    def right(self, ids: list[int], **options: Any) -> list[list[int]]:
        return token_ids(self.single.complete(ids, **options))

    def handed(self, ids: list[int], **options: Any) -> list[list[int]]:
        params = self.prefill.prefill(ids)
        return token_ids(self.decode.complete(ids, kv_transfer_params=params, **options))

    def moved(self) -> float:
        return self.decode.metric("disagg_handoff_bytes_total", transport="process_memory")

    def failed(self, reason: str) -> float:
        return self.decode.metric("disagg_kv_load_failures_total", reason=reason)


@pytest.fixture(
    scope="module",
    params=[
        (STEPS, True),
        pytest.param((STEPS, False), marks=pytest.mark.slow),
        pytest.param((ONE_PAGE, False), marks=pytest.mark.slow),
    ],
    ids=["tiers", "prefix caching", "none"],
)
def three(
    vllm_server: Callable[..., VllmServer],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Three]:
    model, logs = tmp_path_factory.mktemp("model") / "states", tmp_path_factory.mktemp("logs")
    make_states(model)
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp")), "VLLM_SERVER_DEV_MODE": "1"}
    args, tiered = request.param

    def server(name: str, connector: dict[str, object] | None, *args: str) -> VllmServer:
        args = ("--max-model-len", "4096", *args)
        return vllm_server(name, model, logs / name, connector, args, env=env)

    both = transfer("kv_both", lease_s=LEASE_S)
    if tiered:
        folder = str(tmp_path_factory.mktemp("tiers"))
        kept = tiers(host_bytes=1 << 28, directory=folder, reset_keeps_files=True)
        both = beside(both, kept)
    few = ("--num-gpu-blocks-override", "64")
    with running(
        [
            prefill := server("prefill", both, "--num-gpu-blocks-override", "128", *args),
            decode := server("decode", both, *few, *args),
            single := server("single", None, "--num-gpu-blocks-override", "128", *ONE_PAGE),
        ]
    ):
        yield Three(prefill, decode, single, tiered, args == STEPS and not tiered)


@lengths(2, 257, 513, long=[256, 258, 3000])
def test_the_state_before_the_last_token_moves(three: Three, prompt: Prompt, length: int) -> None:
    ids, before = prompt(length), three.moved()
    assert three.handed(ids) == three.right(ids)
    blocks = -(-(length - 1) // BLOCK)
    assert three.moved() - before == (blocks + STATES) * PAGE
    assert token_ids(three.decode.complete(ids)) == three.right(ids), "it cached what is not so"
    assert token_ids(three.prefill.complete(ids)) == three.right(ids), "it cached what is not so"


@lengths(257, long=[2, 513, 3000])
def test_followed(three: Three, prompt: Prompt, length: int) -> None:
    check_followed(three.prefill, three.decode, lambda: prompt(length), three.right)


def test_one_token_is_computed(three: Three, prompt: Prompt) -> None:
    ids = prompt(1)
    body = {**completion(ids, max_tokens=1), PARAMS: {"do_remote_decode": True}}
    assert three.prefill.post(PATH, body).json().get(PARAMS) is None


def test_a_state_behind_the_last_token_is_of_no_use(three: Three, prompt: Prompt) -> None:
    """Of a prefill whose token was asked for: it serves prompts that go on, and not its own."""
    ids, before = prompt(700), three.failed("state")
    body = {**completion(ids, max_tokens=1), PARAMS: REMOTE_DECODE_AND_TOKEN}
    answer = three.prefill.post(PATH, body).json()
    assert token_ids(answer)[0] == three.right(ids)[0][:1]
    own = three.decode.complete(ids, kv_transfer_params=answer[PARAMS])
    assert token_ids(own) == three.right(ids)
    assert three.failed("state") == before + 1


def test_the_next_turn(three: Three, prompt: Prompt) -> None:
    """Tiers, for one, cannot go on behind blocks of attention alone; all of it moves again."""
    ids = prompt(900)
    three.handed(ids)
    longer, before = [*ids, *prompt(400)], three.moved()
    assert three.handed(longer) == three.right(longer)
    had = 900 // BLOCK if three.goes_on else 0
    assert three.moved() - before == (-(-1299 // BLOCK) - had + STATES) * PAGE


def test_another_prompt_that_begins_alike(three: Three, prompt: Prompt) -> None:
    ids, before = prompt(1000), three.failed("prompt_mismatch")
    params = three.prefill.prefill(ids)
    other = [*ids[:600], *prompt(200)]
    answer = three.decode.complete(other, kv_transfer_params=params)
    assert token_ids(answer) == three.right(other)
    assert three.failed("prompt_mismatch") == before + 1


def test_a_load_that_fails(three: Three, prompt: Prompt) -> None:
    """Also after a hit in decode's own prefix cache."""
    ids = prompt(600)
    three.decode.complete(ids)
    longer, before = [*ids, *prompt(400)], three.failed("lease_gone")
    gone = [(prompt, three.prefill.prefill(prompt)) for prompt in (longer, prompt(700))]
    time.sleep(LEASE_S + 1)
    for one, params in gone:
        answer = three.decode.complete(one, kv_transfer_params=params)
        assert token_ids(answer) == three.right(one)
    assert three.failed("lease_gone") == before + 2


def test_more_at_once_than_there_is_room_for(three: Three, prompt: Prompt) -> None:
    """64 blocks for what takes about 90; all is right, and nothing is held after."""
    prompts = [prompt(200 + 250 * number) for number in range(10)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: three.handed(ids, max_tokens=100), prompts))
        right = list(pool.map(lambda ids: three.right(ids, max_tokens=100), prompts))
    assert answers == right
    assert eventually(lambda: three.prefill.metric("disagg_leases_held") == 0)


def test_two_answers_of_one_prompt(three: Three, prompt: Prompt) -> None:
    ids, drawn = prompt(700), {"n": 2, "temperature": 1.0, "seed": 7}
    assert three.handed(ids, **drawn) == three.right(ids, **drawn)


@lengths(256, long=[1, 1000])
def test_a_stream_that_begins_at_prefill(three: Three, prompt: Prompt, length: int) -> None:
    """Its lease has the state behind the whole prompt, and decode goes on behind its token."""
    pairing = {"first_token": "prefill", "local_prefill_tokens": 0}
    with routed([three.prefill], [three.decode], pairing=pairing) as url:
        asked = {**completion(prompt(length)), "model": "tiny"}

        def begins_at_prefill() -> bool:
            """Not before the router has asked the engine for its length."""
            stream(url, PATH, {**asked, "prompt": prompt(200)}, Streamed())
            return begun(url) > 0

        assert eventually(begins_at_prefill)
        seen, before, moved = Streamed(), begun(url), three.moved()
        stream(url, PATH, asked, seen)
        assert seen.tokens == three.right(asked["prompt"])[0]
        assert begun(url) == before + 1
        assert three.moved() - moved == (-(-length // BLOCK) + STATES) * PAGE


@pytest.fixture
def tiered(three: Three) -> EnginesWithTiers:
    if not three.tiered:
        pytest.skip("without tiers")
    return EnginesWithTiers(three.single, three.prefill, three.decode, PAGE)


@lengths(640, long=[257, 3000])
def test_what_tiers_keep(tiered: EnginesWithTiers, prompt: Prompt, length: int) -> None:
    """All blocks of attention, and of each state that behind the last full one."""
    full, all_full = (length - 1) // BLOCK, (length + ANSWER - 1) // BLOCK
    loads = full + STATES, all_full + STATES
    kept = (1 + STATES) * all_full
    tiered.check_what_is_loaded(prompt, length, full * BLOCK, kept, loads)


@pytest.mark.slow
def test_tiers_beside_the_handoff_and_under_pressure(
    tiered: EnginesWithTiers, prompt: Prompt
) -> None:
    tiered.check_under_pressure(prompt)


@pytest.mark.slow
def test_sabotage(three: Three) -> None:
    check_under_sabotage([three.prefill], [three.decode], three.single, requests=200)


@pytest.mark.slow
def test_linear_attention_as_near_as_other_steps(
    vllm_server: Callable[..., VllmServer], prompt: Prompt, tmp_path: Path
) -> None:
    """In bfloat16 plain vLLM does not agree with itself from step size to step size. What is handed
    over is not further from it than that, and every other prompt is."""
    make_gated_deltas(tmp_path / "model")
    env = {"TMPDIR": str(tmp_path)}
    args = ("--max-model-len", "4096", "--num-gpu-blocks-override", "128", "--max-logprobs", "50")

    def server(name: str, connector: dict[str, object] | None, *more: str) -> VllmServer:
        place = tmp_path / "model", tmp_path / f"{name}.log"
        return vllm_server(name, *place, connector, (*args, *more), dtype="bfloat16", env=env)

    three = Three(
        server("prefill", transfer("kv_producer")),
        server("decode", transfer("kv_consumer")),
        server("single", None, *ONE_PAGE),
    )
    with running([three.prefill, three.decode, three.single]):
        for length in (5, 129, 256, 700, 1500):
            ids = prompt(length)
            handed = {"kv_transfer_params": three.prefill.prefill(ids)}
            likely = most_likely(three.decode, ids, **handed)
            assert len(likely & most_likely(three.single, ids)) >= 40
            assert len(likely & most_likely(three.single, [*prompt(length - 1), ids[-1]])) <= 10
        loaded = {"transport": "process_memory", "outcome": "loaded"}
        assert three.decode.metric("disagg_handoffs_total", **loaded) == 5


def most_likely(server: VllmServer, ids: list[int], **options: Any) -> set[str]:
    """Of the first token."""
    answer = server.complete(ids, max_tokens=1, logprobs=50, **options)
    return set(answer["choices"][0]["logprobs"]["top_logprobs"][0])


@pytest.mark.slow
def test_what_is_refused_at_start(vllm_server: Callable[..., VllmServer], tmp_path: Path) -> None:
    """Chunks of blocks do not end with a state, and drafts take states of which one is right."""
    make_states(tmp_path / "model")
    env, args = {"TMPDIR": str(tmp_path)}, ("--max-model-len", "4096", *STEPS)
    draft = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
    both = beside(transfer("kv_both"), tiers(host_bytes=1 << 28, blocks_per_chunk=2))
    refused = {
        "blocks_per_chunk: 2": (both, args),
        "speculative_config: ngram": (transfer("kv_both"), (*args, "--speculative-config", draft)),
    }
    for said, (connector, arguments) in refused.items():
        place = tmp_path / "model", tmp_path / "log"
        server = vllm_server("refused", *place, connector, arguments, env=env)
        with server, pytest.raises(StartupError):
            server.wait_ready()
        assert said in server.tail(10_000)
