"""Hidden states of a real engine, one file per request, checked against plain transformers.

Without `--model` it makes a small checkpoint. Runs on CPUs and GPUs:

    .venv/bin/python examples/hidden_states.py
    .venv/bin/python examples/hidden_states.py --model Qwen/Qwen3-0.6B --layers 1 14 27
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# For CPU engines; vLLM ignores them elsewhere.
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
LENGTHS = (1, 40, 128, 300, 700)
CHUNK = 512  # the longest prompt is computed in two steps
TOLERANCE = 1e-4  # of the largest value; both compute in float32, in another order


def main() -> int:
    """Prints a table; exit status 1 if any state differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a checkpoint; a small one is made if not given")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3], help="0: embeddings")
    parser.add_argument("--folder", help="where the files go; a temporary folder if not given")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    options = parser.parse_args()
    for name, value in CPU.items():
        os.environ.setdefault(name, value)

    with tempfile.TemporaryDirectory(prefix="disagg-hidden-states-") as temporary:
        model = options.model or small_model(Path(temporary) / "model")
        folder = options.folder or str(Path(temporary) / "states")
        layers = sorted(options.layers)  # the order in which they come
        prompts = random_prompts()
        answers = run(model, layers, folder, options.tensor_parallel_size, prompts)
        return compare(model, layers, prompts, answers)


def small_model(path: Path) -> str:
    """Random weights, the same every time."""
    from disagg.testing.checkpoint import make_model

    make_model(path)
    return str(path)


def random_prompts() -> list[list[int]]:
    """Token ids."""
    generator = random.Random(0)
    return [[generator.randrange(300, 1000) for _ in range(length)] for length in LENGTHS]


# States by name, the size of their file in bytes, and the seconds until they were there.
Answer = tuple[dict[str, Any], int, float]


def run(
    model: str, layers: list[int], folder: str, tensor_parallel_size: int, prompts: list[list[int]]
) -> list[Answer]:
    """What a client has of each prompt: its states, the file's size, the seconds it waited."""
    from vllm import LLM, SamplingParams

    from disagg.connector.hidden_states import cleanup_hidden_states, load_hidden_states

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=CHUNK,
        tensor_parallel_size=tensor_parallel_size,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "disagg.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    )
    requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = []
    for output in llm.generate(requests, SamplingParams(max_tokens=1), use_tqdm=False):
        path = (output.kv_transfer_params or {})["hidden_states_path"]
        started = time.perf_counter()
        states = load_hidden_states(path, timeout=60)  # sleeps until it is written
        seconds = time.perf_counter() - started
        answers.append((states, os.path.getsize(path), seconds))
        cleanup_hidden_states(path)
    llm.llm_engine.engine_core.shutdown()  # ends its processes; at Python's own end it may hang
    return answers


def compare(model: str, layers: list[int], prompts: list[list[int]], answers: list[Answer]) -> int:
    """Print what was found; returns the exit status."""
    import torch
    from transformers import AutoModel

    plain = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    print(f"\n{'tokens':>6}  {'shape':>14}  {'bytes':>9}  {'waited ms':>9}  difference by layer")
    worst = 0.0
    for prompt, (states, size, seconds) in zip(prompts, answers, strict=True):
        if states["token_ids"].tolist() != prompt:
            print("the token ids are not the prompt's")
            return 1
        with torch.no_grad():
            # [layers + 1] of [1, tokens, hidden]; the last one is normalized, so it isn't asked for
            expected = plain(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        differences = []
        for index, layer in enumerate(layers):
            if layer >= len(expected) - 1:
                raise SystemExit(f"--layers: {layer} — must be below {len(expected) - 1} here")
            ours, theirs = states["hidden_states"][:, index], expected[layer][0]
            differences.append(float((ours - theirs).abs().max() / theirs.abs().max()))
        worst = max(worst, *differences)
        shape = "x".join(map(str, states["hidden_states"].shape))
        shown = "  ".join(f"{layer}: {d:.1e}" for layer, d in zip(layers, differences, strict=True))
        print(f"{len(prompt):>6}  {shape:>14}  {size:>9}  {seconds * 1e3:>9.1f}  {shown}")
    equal = worst <= TOLERANCE
    print(
        f"\n{'equal' if equal else 'NOT EQUAL'} to plain transformers: at most {worst:.1e} of the"
    )
    print(f"largest value apart, {TOLERANCE:.0e} allowed")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
