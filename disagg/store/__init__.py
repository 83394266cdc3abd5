"""KV blocks outside the accelerator: content-addressed tiers and their eviction.

`base` is the contract. Every tier has an index, which decides, in vLLM's scheduler process, and a
half in each worker rank's process, which moves bytes:

    host memory    `host_index.HostIndex`        `host_pool.HostPool`
    directory      `shared_index.SharedIndex`    `directory.Directory`, `directory_space`
    object store   `shared_index.SharedIndex`    `objects.tier.Objects`, `objects.space`

Imports neither vLLM nor Ray nor torch, so that tiers run and are measured where none is installed.
"""
