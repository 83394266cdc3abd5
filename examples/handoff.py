"""One handoff by hand: what a router does, in twenty lines.

Works with any two engines that load our connector, for instance two plain vLLM servers
(`examples/plain_vllm.sh` starts a pair):

    .venv/bin/python examples/handoff.py http://127.0.0.1:8101 http://127.0.0.1:8102
"""

from __future__ import annotations

import argparse
import json

import httpx

# What NIXL-speaking routers send to the prefill engine.
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def main() -> None:
    """Prefill on one engine, decode on the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prefill")
    parser.add_argument("decode")
    parser.add_argument("--prompt", default="Once upon a time, " * 40)
    options = parser.parse_args()

    with httpx.Client(timeout=120) as client:
        model = client.get(f"{options.decode}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": options.prompt, "temperature": 0}
        leg = {**body, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
        first = client.post(f"{options.prefill}/v1/completions", json=leg).raise_for_status()
        params = first.json()["kv_transfer_params"]
        shown = {key: value for key, value in params.items() if key != "disagg"}
        print("prefill handed out:", json.dumps(shown, indent=2))

        leg = {**body, "max_tokens": 32, "kv_transfer_params": params}
        answer = client.post(f"{options.decode}/v1/completions", json=leg).raise_for_status()
        print("decode answered:", answer.json()["choices"][0]["text"])
        for line in client.get(f"{options.decode}/metrics").text.splitlines():
            if line.startswith(("disagg_handoffs_total", "disagg_handoff_bytes_total")):
                print(line)


if __name__ == "__main__":
    main()
