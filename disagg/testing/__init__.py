"""What the demo, benchmarks, chaos commands and tests share: a checkpoint, servers, clients."""
