"""`disagg bench vllm`: vLLM's own load generator, `vllm bench serve`, with its own options.

vLLM's command refuses to start where vLLM is built for CPU: its package has another name there.
"""

from __future__ import annotations

from collections.abc import Sequence


def run(words: Sequence[str]) -> int:
    """Run it with these words. Returns the exit status."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="disagg bench vllm")  # type: ignore[no-untyped-call]
    add_cli_args(parser)
    main(parser.parse_args(list(words)))
    return 0
