"""Each difference between the versions of vLLM that disagg runs with, by name.

A difference states the versions that have it. Code of this package asks `NAME.here`, which is true
if the installed vLLM is one of them, and imports what only those versions have under that
condition: `make vllm-next` reads these conditions to know which names a version must have.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.vllm_compat import versions


@dataclass(frozen=True)
class Difference:
    """versions: that have it, a PEP 440 specifier. what: they do, and what this package does."""

    name: str
    versions: str
    what: str

    @property
    def here(self) -> bool:
        """Whether the installed vLLM has it."""
        return versions.matches(self.versions)


RESULTS_AS_SETS = Difference(
    "RESULTS_AS_SETS",
    "<0.30",
    "A connector has no `get_transfer_results`: it returns two sets of request ids, and the ids of "
    "the blocks that failed to load. `transfers.py` makes these of our results.",
)
ONE_GROUP_OF_INVALID_BLOCKS = Difference(
    "ONE_GROUP_OF_INVALID_BLOCKS",
    "<0.30",
    "The scheduler finds the request of an invalid block in caches of a single group only, and "
    "ends the engine for others. `manager.py` finds it in any group.",
)
ONLY_THE_BLOCK_POOL = Difference(
    "ONLY_THE_BLOCK_POOL",
    "<0.30",
    "The scheduler gives connectors its block pool, not its manager: no `bind_kv_cache_manager`. "
    "`manager.py` finds the manager of a pool.",
)
BLOCK_TABLES_IN_A_DICT = Difference(
    "BLOCK_TABLES_IN_A_DICT",
    "<0.30",
    "A step's block tables are a dictionary of requests that got blocks; later `get_block_ids` "
    "returns that of any. `manager.py` adds the others.",
)
LOADED_REQUESTS_WAIT_IN_LINE = Difference(
    "LOADED_REQUESTS_WAIT_IN_LINE",
    "<0.31",
    "The scheduler stops at the first waiting request that gets no blocks, and never reaches one "
    "behind it that holds them; later it serves those first. Requests step aside for such a one.",
)
ADMISSION_CAP_IS_PRIVATE = Difference(
    "ADMISSION_CAP_IS_PRIVATE",
    "<0.31",
    "A manager's `max_admission_blocks_per_request` has an underscore before its name.",
)
NO_DRAFT_CACHE_FLAG = Difference(
    "NO_DRAFT_CACHE_FLAG",
    "<0.30",
    "`uses_draft_kv_cache` is not there: it is read from the method of speculation.",
)
NO_FINISH_FORWARD = Difference(
    "NO_FINISH_FORWARD",
    "<0.30",
    "The second model runner does not tell connectors that a forward pass was launched.",
)
IDLE_STEPS_SAVE_NOTHING = Difference(
    "IDLE_STEPS_SAVE_NOTHING",
    "<0.31",
    "`wait_for_save` is not called in steps without tokens. `transfers.py` calls it for connectors "
    "of ours.",
)
LOGGING_IS_GLOBAL = Difference(
    "LOGGING_IS_GLOBAL", "<0.31", "Logging has no arguments that a process must apply."
)
NO_VIEWS_OF_LAYERS = Difference(
    "NO_VIEWS_OF_LAYERS", "<0.30", "Every KV cache spec has a view for each layer, and no flag."
)
HASHES_BY_CONFIG = Difference(
    "HASHES_BY_CONFIG",
    "<0.32",
    "`KVCacheConfig` has no `hash_block_size`: it is computed from the configuration.",
)
NO_STRIDE_ALIGNMENT = Difference(
    "NO_STRIDE_ALIGNMENT", "<0.31", "Blocks of a KV cache need no alignment."
)
ALIGNMENT_IN_BYTES = Difference(
    "ALIGNMENT_IN_BYTES",
    ">=0.31,<0.32",
    "The alignment of blocks is a number of bytes, or None; later a method returns it.",
)
BACKENDS_ALONE_CHOOSE = Difference(
    "BACKENDS_ALONE_CHOOSE",
    "<0.32",
    "The size of kernel blocks depends on the attention backends, not on the layers' specs.",
)
CALLER_NAMES_LOAD_ARGUMENTS = Difference(
    "CALLER_NAMES_LOAD_ARGUMENTS",
    ">=0.30,<0.32",
    "The second model runner passes `start_load_kv` what its own caller names.",
)
NO_LOAD_ARGUMENTS = Difference(
    "NO_LOAD_ARGUMENTS", "<0.30", "The second model runner passes `start_load_kv` no arguments."
)
LOADED_BLOCKS_ARE_NOT_ZEROED = Difference(
    "LOADED_BLOCKS_ARE_NOT_ZEROED",
    "<0.32",
    "The blocks of an asynchronous load are never zeroed; later a connector says by "
    "`get_loaded_kv_cache_group_ids` which groups it loads. Ours always says all.",
)
LAST_STATE_IS_BEHIND_THE_PROMPT = Difference(
    "LAST_STATE_IS_BEHIND_THE_PROMPT",
    "<0.32",
    "Of a prompt that fills its last block, no recurrent state is computed one block before its "
    "end; later a step ends there, and the same prompt can begin there. Nothing is done: with "
    "tiers it begins where an earlier step ended, with vLLM's own cache at its first token.",
)
NO_LATE_INTERACTION = Difference(
    "NO_LATE_INTERACTION", "<0.32", "No argument of the server's changes the pooler's config."
)
ARGUMENTS_MOVED = Difference(
    "ARGUMENTS_MOVED",
    ">=0.33",
    "The server's arguments are defined and checked in `entrypoints/common/cli_args.py`, before in "
    "`entrypoints/launchers`.",
)
SLEEP_IS_CLAIMED = Difference(
    "SLEEP_IS_CLAIMED",
    ">=0.33",
    "A connector says whether it follows when sleep mode moves the KV cache, and the default is "
    "yes. Ours do not.",
)
RESULTS_BEFORE_DRAFTS = Difference(
    "RESULTS_BEFORE_DRAFTS",
    ">=0.33",
    "The second model runner takes a connector's results before a draft model runs, and calls "
    "`wait_for_save` after it, as the first one always did. `transfers.py` says which.",
)
PLANNING_MOVED = Difference(
    "PLANNING_MOVED",
    ">=0.33",
    "`get_kv_cache_config_from_groups` is in `v1/core/kv_cache_planning.py`.",
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Difference))
