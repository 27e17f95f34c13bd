"""Triton kernels and their launchers, installed as `fastdp.kernels`: a module an operator family, by stem.

They take and give torch tensors, know nothing of the rest of fastdp, and need no autotuning. linear: norms and
per-sample gradients of matrix products (products: the kernels); clipped: their clipped sums; many: both, of layers of
equal shape at once; segments: of routed rows; conv: convolutions (patches: the kernels); norm: affine parameters of
layer, RMS and group norm; embedding: the cross term of a tied table; rows: stored per-sample gradients.
`python -m fastdp.kernels.report` compiles all of them without a GPU.
"""
