"""The router's estimate of a prompt beside what a real engine counts, with a real tokenizer.

The tokenizer is Tekken's, which mistral-common carries; the template writes tools and tool calls as
those of Hermes and Qwen do.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agent_bodies
import mistral_common
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from disagg.router.api.paths import CHAT, MESSAGES, RESPONSES
from disagg.router.request.plan import RequestPlan
from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer

TOKENS = 130_000
SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools %}<|im_start|>system
{{ system }}
{%- if tools %}

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each function call, return a json object with function name and arguments within
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{%- endif %}<|im_end|>
{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{%- if message.reasoning %}
<think>
{{ message.reasoning }}
</think>
{%- endif %}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def server(
    vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("estimates")
    write_model(folder / "model")
    (folder / "chat.jinja").write_text(TEMPLATE)
    args: tuple[str, ...] = (
        "--chat-template",
        str(folder / "chat.jinja"),
        "--max-model-len",
        "32768",
    )
    args += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    args += ("--num-gpu-blocks-override", "260")
    with vllm_server("real-tokenizer", folder / "model", None, None, args) as server:
        server.wait_ready()
        yield server


def write_model(folder: Path) -> None:
    """A model of random weights with Tekken's tokenizer."""
    carried = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    tekken = json.loads(carried.read_text())
    letter = _letters()
    tokens = [base64.b64decode(one["token_bytes"]) for one in tekken["vocab"][:TOKENS]]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    spelt = {token: "".join(letter[byte] for byte in token) for token in tokens}
    pairs = [pair for token in tokens if len(token) > 1 and (pair := _pair(token, ranks))]
    model = models.BPE(
        vocab={spelt[token]: rank for token, rank in ranks.items()},
        merges=[(spelt[left], spelt[right]) for left, right in pairs],
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(tekken["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[1])
    fast.save_pretrained(folder)
    shape = Qwen3Config(
        vocab_size=TOKENS + len(SPECIAL),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)


def _letters() -> list[str]:
    """How byte-level tokenizers write each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


def _pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens whose merge makes this one, by the merges before it."""
    pieces = [token[at : at + 1] for at in range(len(token))]
    while len(pieces) > 2:
        best = min(
            range(len(pieces) - 1),
            key=lambda at: ranks.get(pieces[at] + pieces[at + 1], len(ranks)),
        )
        if pieces[best] + pieces[best + 1] not in ranks:
            return None
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return (pieces[0], pieces[1])


def counted(url: str, path: str, body: dict[str, Any]) -> int:
    """The prompt's tokens as the engine counts them."""
    if path == MESSAGES:
        path, name = f"{MESSAGES}/count_tokens", "input_tokens"
    elif path == CHAT:
        path, name = "/tokenize", "count"
    else:
        body, name = {**body, "max_output_tokens": 1, "store": False}, "usage"
    answer = client().post(f"{url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    value = answer.json()[name]
    return int(value["input_tokens"] if name == "usage" else value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, agent_bodies.chat_agent()),
        (CHAT, agent_bodies.chat_agent(2)),
        (MESSAGES, agent_bodies.messages_agent()),
        (RESPONSES, agent_bodies.responses_agent()),
        (CHAT, agent_bodies.long_document()),
        (CHAT, agent_bodies.conversation()),
        (CHAT, agent_bodies.languages()),
    ],
    ids=["agent", "short-agent", "messages", "responses", "document", "conversation", "languages"],
)
def test_estimates_are_within_a_fifth(server: VllmServer, path: str, body: dict[str, Any]) -> None:
    real, estimated = counted(server.url, path, body), RequestPlan(path, body).tokens
    print(f"{path}: {real} tokens, estimated {estimated}, {estimated / real - 1:+.0%}")
    assert abs(estimated / real - 1) < 0.2
