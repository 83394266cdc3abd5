"""Chat with a deployment by the official OpenAI client: a streamed answer, and the tokens used.

    make serve                        # in another terminal, until it says Ready
    .venv/bin/python examples/chat.py "Why is the sky blue?"

The small model that `make serve` starts has random weights: its answers are gibberish.
"""

from __future__ import annotations

import argparse

from openai import APIConnectionError, OpenAI


def main() -> None:
    """Print the answer as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="one of the router's API keys, if it has any")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key=options.key, max_retries=0)
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        raise SystemExit(f"nothing answers at {options.url}: does `make serve` run?") from None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=options.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            used = chunk.usage
            print(f"\n[{model}: {used.prompt_tokens} + {used.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
