"""`disagg bench vllm`: vLLM's own load generator, `vllm bench serve`, with its own options.

vLLM's command refuses to start where vLLM is built for CPU: its package has another name there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def run(words: Sequence[str]) -> NoReturn:
    """Run it with these words, and end this process."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="disagg bench vllm")  # type: ignore[no-untyped-call]
    add_cli_args(parser)
    main(parser.parse_args(list(words)))
    sys.stdout.flush()
    # Without the end of the interpreter: Triton's bindings would fill the screen below the figures.
    os._exit(0)
