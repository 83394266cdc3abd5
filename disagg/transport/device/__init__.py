"""Device memory: the transports' use of a GPU, without naming CUDA.

`base.py` is the contract; `cuda.py` implements it with cupy, and only `open_device` imports it.
"""
