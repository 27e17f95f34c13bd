"""Triton kernels and their launchers, installed as `fastdp.kernels`: a module an operator family, by stem.

They take and give torch tensors, know nothing of the rest of fastdp, and need no autotuning.
"""
