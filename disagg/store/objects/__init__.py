"""Object stores as a tier of KV blocks that engines on several machines share.

`tier` is a worker's half and the index's finder. Both use an `ObjectStore` (`base`) behind a
circuit breaker (`guard`): `s3`, or `valkey` over the protocol in `resp`. `space` limits the size of
what has no limit of its own.

An object is byte for byte what the directory tier's file is: see `directory_files.FileFormat`.
"""
