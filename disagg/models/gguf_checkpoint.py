"""Writes a GGUF file as a checkpoint in float32, as vLLM and transformers load it.

    python -m disagg.models.gguf_checkpoint SOURCE FOLDER

A process of its own: it takes torch, and three times the checkpoint's size in memory.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path


def write(source: Path, folder: Path) -> None:
    """Write config, weights and tokenizer, with its chat template. The weights lose nothing: those
    of the file are multiplied out."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        quantized = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        )
        config = quantized.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # with it, transformers refuses to save
        plain = type(quantized)(config).float()
        plain.load_state_dict(quantized.state_dict())
        plain.tie_weights()
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
