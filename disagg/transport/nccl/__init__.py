"""Blocks over NCCL, one communicator for each pair of workers."""
