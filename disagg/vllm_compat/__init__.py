"""The one place that knows vLLM's versions: which ones run, and where they differ.

`versions.py` has the range and the versions whose KV cache blocks are the same bytes.
`differences.py` names each difference with its versions. The other modules give the rest of disagg
one interface over all versions of the range: `kv_cache.py`, `transfers.py` and `manager.py` to
connectors, `server.py` to engines.

Nothing else may compare vLLM's version or try an import of vLLM's. The patches of
`engine/vllm_patches` state their versions themselves.
"""
