"""Triton kernels and their launchers, installed as `fastdp.kernels`: a module an operator family, by stem.

They take and give torch tensors, know nothing of the rest of fastdp, and need no autotuning. linear: norms and
per-sample gradients of matrix products; clipped: their clipped sums; conv: convolutions; norm: affine parameters of
layer, RMS and group norm. `python -m fastdp.kernels.report` compiles all of them without a GPU.
"""
