"""Settings of all tests. Routes do not depend on what this machine's clock says. Without a GPU Triton's kernels run in
its interpreter, which must be chosen before the first one is defined."""

import os

import torch

os.environ["FASTDP_CALIBRATE"] = "0"
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS gives equal bits, whatever the stream

from .compiled_models import fresh, ran  # noqa: F401  (fixtures)
from .training.skipping import silent  # noqa: F401  (a fixture)
