"""The consumer reads the producer's memory: process memory, CUDA IPC."""
