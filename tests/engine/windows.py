"""Small checkpoints whose KV cache is not one of plain attention alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gemma4 import Gemma4TextConfig
from transformers.models.granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import Qwen3NextConfig

from disagg.testing.tokenizer import write_tokenizer

VOCABULARY, WINDOW, BLOCK = 4096, 256, 128
GROUP_BYTES = 2 * 2 * BLOCK * 2 * 64 * 4  # layers of a group, KV heads, tokens, K and V, dim, float
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "dtype": "float32",
}


def make(config: PretrainedConfig, folder: Path) -> None:
    """A checkpoint whose answers depend on every token: see disagg/testing/checkpoint.py."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for name, weights in model.named_parameters():
        if "embed_tokens" in name:  # small, or models that tie it to the output echo their input
            torch.nn.init.normal_(weights, std=0.02)
        elif weights.dim() == 2 or "experts" in name:
            torch.nn.init.normal_(weights, std=1.28 / weights.shape[-1] ** 0.5)
        elif "q_norm" in name or "k_norm" in name:  # attend to some tokens, not to their mean
            torch.nn.init.ones_(weights)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY, 8192)


SLIDING, FULL = "sliding_attention", "full_attention"


def make_windows(folder: Path, layers: Sequence[str] = (SLIDING, SLIDING, FULL) * 2) -> None:
    """With these layers three KV cache groups: two of sliding layers, one of full ones."""
    config = Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=len(layers),
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=WINDOW,
        layer_types=[*layers],
    )
    make(config, folder)


def make_experts(folder: Path, layers: int = 4) -> None:
    """A mixture: of eight experts each token gets two."""
    config = Qwen3MoeConfig(
        **SIZES,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
    )
    make(config, folder)


def make_mixed(folder: Path) -> None:
    """Gemma 4: a full layer's token has twice the bytes, so its blocks have half the tokens."""
    full: dict[str, Any] = {"global_head_dim": 128, "num_global_key_value_heads": 2}
    config = Gemma4TextConfig(
        **SIZES,
        **full,
        num_hidden_layers=6,
        num_key_value_heads=2,
        head_dim=64,
        attention_k_eq_v=False,
        sliding_window=WINDOW,
        layer_types=[SLIDING, SLIDING, FULL] * 2,
        enable_moe_block=False,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    )
    make(config, folder)


STATES, PAGE = 3, 256 * 2 * 2 * 64 * 4  # layers with state; a block of any layer in bytes


def make_states(folder: Path) -> None:
    """Mamba layers before one of attention: four KV cache groups of a layer each."""
    config = GraniteMoeHybridConfig(
        **SIZES,
        num_hidden_layers=STATES + 1,
        num_key_value_heads=2,
        shared_intermediate_size=512,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        layer_types=["mamba"] * STATES + ["attention"],
    )
    make(config, folder)


def make_gated_deltas(folder: Path) -> None:
    """Qwen3-Next's linear attention, which vLLM's CPU kernels compute in bfloat16 alone."""
    config = Qwen3NextConfig(
        **SIZES,
        num_hidden_layers=STATES + 1,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        layer_types=["linear_attention"] * STATES + ["full_attention"],
    )
    make(config, folder)


def make_dense_gated_deltas(folder: Path) -> None:
    """Qwen3.5: linear attention before full attention, and no mixture of experts."""
    config = Qwen3_5TextConfig(
        **SIZES,
        num_hidden_layers=STATES + 1,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention"] * STATES + ["full_attention"],
    )
    make(config, folder)


LATENT, ROTATED = 512, 64


def make_latent(folder: Path, layers: int) -> None:
    """MLA: one latent of every token for all heads. Without experts."""
    config = DeepseekV2Config(
        **SIZES,
        num_hidden_layers=layers,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=128,
        qk_rope_head_dim=ROTATED,
        v_head_dim=128,
        first_k_dense_replace=layers,
    )
    make(config, folder)
