"""Device memory: what transports need of a GPU, without naming CUDA.

`base.py` says what that is, `cuda.py` does it through cupy and is imported by `open_device` alone.
"""
