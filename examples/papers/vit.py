"""A pre-trained ViT-S/14 (22M) of DINOv2's shape (Oquab et al. 2023), of the hub, a folder or an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ViT(nn.Module):
    """Images [B, 3, H, W] -> features: the class token's and the mean of the patches', side by side."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.width = body, 2 * body.config.hidden_size
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.body((images - self.mean) / self.std).last_hidden_state
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)


def vit(where: str, size: int) -> ViT:
    """DINOv2 of the hub or a folder, or of an ONNX file with its names; positions made for images of this size."""
    from transformers import Dinov2Config, Dinov2Model

    if where.endswith(".onnx"):
        body = Dinov2Model(Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14))
        state, wanted = onnx_state(Path(where)), body.state_dict()
        state = {name if name in wanted else renamed(name): a for name, a in state.items()}
        missing, unexpected = body.load_state_dict(state, strict=False)
        if unexpected or [name for name in missing if "mask_token" not in name]:
            raise SystemExit(f"{where} has other weights than a ViT-S/14's: {missing[:3]} {unexpected[:3]}")
    else:
        body = Dinov2Model.from_pretrained(where)
    return ViT(resized(body, size))


def renamed(name: str) -> str:
    """A weight's name in transformers before 5 -> the one of today."""
    for old, new in (("attention.query", "q_proj"), ("attention.key", "k_proj"), ("attention.value", "v_proj"),
                     ("output.dense", "o_proj")):  # fmt: skip
        name = name.replace(f".attention.{old}.", f".attention.{new}.")
    return name


def resized(body: Any, size: int) -> Any:
    """The model with its table of positions made for this size once, which the model else does in every forward."""
    embeddings = body.embeddings
    side = size // body.config.patch_size
    with torch.no_grad():
        old = embeddings.position_embeddings
        grid = round((old.shape[1] - 1) ** 0.5)
        patches = old[:, 1:].reshape(1, grid, grid, -1).permute(0, 3, 1, 2)
        patches = F.interpolate(patches, (side, side), mode="bicubic", align_corners=False)
        table = torch.cat([old[:, :1], patches.permute(0, 2, 3, 1).reshape(1, side * side, -1)], 1)
    embeddings.position_embeddings = nn.Parameter(table)
    embeddings.mask_token = None  # of pre-training; a parameter without a use would only be given noise
    return body


def onnx_state(path: Path) -> dict[str, Tensor]:
    """Weights by transformers' names; matrices have lost theirs in ONNX, and get them from the nodes that use them."""
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError:
        raise SystemExit("reading the weights of an ONNX file needs onnx: pip install onnx") from None
    graph = onnx.load(str(path)).graph
    arrays = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in graph.initializer}
    state = {name.removeprefix("backbone."): a for name, a in arrays.items() if name.startswith("backbone.")}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            name = node.name.strip("/").removesuffix("/MatMul").replace("/", ".").removeprefix("backbone.")
            state[name + ".weight"] = arrays[node.input[1]].t().contiguous()
        if node.op_type == "Concat" and node.input[0] in arrays and "embeddings" in node.name:
            patches = next(a for a in arrays.values() if a.dim() == 3 and a.shape[1] > 1)
            state["embeddings.position_embeddings"] = torch.cat([arrays[node.input[0]], patches], 1)
    return state
