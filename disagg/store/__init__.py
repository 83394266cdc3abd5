"""Where KV blocks rest outside the accelerator: content-addressed tiers and their eviction.

`base` is the contract. Every tier has a half that decides (an index, in vLLM's scheduler process)
and a half that moves bytes (in each worker rank's process):

    host memory   `host_index.HostIndex`            `host_pool.HostPool`
    directory     `directory_index.DirectoryIndex`  `directory.Directory`, `directory_space`

Imports neither vLLM nor Ray nor torch, so that tiers run and are measured where none is installed.
"""
