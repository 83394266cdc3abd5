"""vLLM's OpenAI server: where its versions define and check its arguments.

Imports vLLM when a function is called, as the rest of `engine` does.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from disagg.vllm_compat.differences import ARGUMENTS_MOVED, LOGGING_IS_GLOBAL, NO_LATE_INTERACTION

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs


def argument_file() -> str:
    """The file that defines the server's arguments, relative to vLLM's folder."""
    folder = "common" if ARGUMENTS_MOVED.here else "launchers"
    return f"entrypoints/{folder}/cli_args.py"


def make_arg_parser(parser: ArgumentParser) -> ArgumentParser:
    """Add the arguments of engine and server to a parser of vLLM's class."""
    if ARGUMENTS_MOVED.here:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    else:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

    made: ArgumentParser = make_arg_parser(parser)  # type: ignore[no-untyped-call, unused-ignore]
    return made


def configure_logging(parsed: Namespace) -> None:
    """Apply the arguments of logging to this process and those that it starts."""
    if not LOGGING_IS_GLOBAL.here:
        from vllm.logger import configure_logging_from_args

        configure_logging_from_args(parsed)


def validate_serve_args(parsed: Namespace) -> None:
    """vLLM's first check of the arguments. Raises its own errors."""
    if ARGUMENTS_MOVED.here:
        from vllm.entrypoints.common.cli_args import validate_parsed_serve_args
    else:
        from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    validate_parsed_serve_args(parsed)


def validate_server_args(parsed: Namespace) -> None:
    """vLLM's check of what plugins may have added. Raises its own errors."""
    if ARGUMENTS_MOVED.here:
        from vllm.entrypoints.common.cli_args import validate_api_server_args
    else:
        from vllm.entrypoints.launchers.launcher import validate_api_server_args

    validate_api_server_args(parsed)  # type: ignore[no-untyped-call, unused-ignore]


def propagate_late_interaction(parsed: Namespace, args: AsyncEngineArgs) -> None:
    """Copy a setting of the server's into the engine's arguments."""
    if NO_LATE_INTERACTION.here:
        return
    if ARGUMENTS_MOVED.here:
        from vllm.entrypoints.common.cli_args import propagate_flash_late_interaction
    else:
        from vllm.entrypoints.launchers.cli_args import propagate_flash_late_interaction

    propagate_flash_late_interaction(parsed, args)
