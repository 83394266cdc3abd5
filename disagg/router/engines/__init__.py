"""The router's knowledge of each engine: health, compatibility, LoRA adapters."""
