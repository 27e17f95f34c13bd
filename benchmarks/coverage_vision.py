"""Image models of other libraries (see coverage_libraries.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .coverage_library import features, image, library_case, module, noisy_image
from .coverage_truth import Case, Sizes


def vit_pytorch() -> Iterator[Case]:
    base: dict[str, Any] = {"num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
    plain = {"image_size": 32, "patch_size": 8, **base}
    swept: list[tuple[str, str, int, dict[str, Any]]] = [
        ("vit", "ViT", 32, plain), ("simple_vit", "SimpleViT", 32, plain), ("deepvit", "DeepViT", 32, plain),
        ("cait", "CaiT", 32, {**plain, "cls_depth": 1}),
        ("t2t", "T2TViT", 32, {"image_size": 32, "t2t_layers": ((7, 4), (3, 2)), **base}),
        ("cct", "CCT", 32, {"img_size": 32, "embedding_dim": 16, "n_conv_layers": 1, "kernel_size": 7, "stride": 2,
                            "padding": 3, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 5}),
        ("cross_vit", "CrossViT", 32, {
            "image_size": 32, "num_classes": 5, "depth": 1, "sm_dim": 16, "sm_patch_size": 8, "sm_enc_depth": 1,
            "sm_enc_heads": 2, "sm_enc_mlp_dim": 32, "lg_dim": 16, "lg_patch_size": 16, "lg_enc_depth": 1,
            "lg_enc_heads": 2, "lg_enc_mlp_dim": 32, "cross_attn_depth": 1, "cross_attn_heads": 2}),
        ("pit", "PiT", 32, {**plain, "depth": (1, 1)}),
        ("nest", "NesT", 32, {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2,
                              "block_repeats": (1, 1), "num_classes": 5}),
        ("vit_with_patch_merger", "ViT", 32, {**plain, "patch_merge_layer": 0, "patch_merge_num_tokens": 4}),
        ("vit_for_small_dataset", "ViT", 32, plain), ("rvt", "RvT", 32, plain),
        ("parallel_vit", "ViT", 32, {**plain, "num_parallel_branches": 2}),
        ("look_vit", "LookViT", 32, {"dim": 16, "image_size": 32, "num_classes": 5, "depth": 1, "patch_size": 8,
                                     "heads": 2, "mlp_factor": 2, "highres_patch_size": 4, "cross_attn_heads": 2}),
        ("simple_vit_with_register_tokens", "SimpleViT", 32, plain),
        ("simple_vit_with_qk_norm", "SimpleViT", 32, plain), ("learnable_memory_vit", "ViT", 32, plain),
        ("normalized_vit", "nViT", 32, plain),
    ]  # fmt: skip
    for name, kind, size, given in swept:
        make = lambda name=name, kind=kind, given=given: getattr(module(f"vit_pytorch.{name}"), kind)(**given)
        yield library_case(f"vit_pytorch {name}", make, image(size))
    normed: list[tuple[str, str, dict[str, Any]]] = [
        ("levit", "LeViT", {"image_size": 64, "num_classes": 5, "stages": 2, "dim": (16, 32), "depth": 1,
                            "heads": (2, 2), "mlp_mult": 2}),
        ("cvt", "CvT", {"num_classes": 5, "s1_emb_dim": 8, "s2_emb_dim": 16, "s2_heads": 2, "s2_depth": 1,
                        "s3_emb_dim": 16, "s3_heads": 2, "s3_depth": 1}),
        ("mobile_vit", "MobileViT", {"image_size": (64, 64), "dims": [16, 16, 16], "channels": [8] * 10 + [16],
                                     "num_classes": 5}),
    ]  # fmt: skip
    for name, kind, given in normed:
        make = lambda name=name, kind=kind, given=given: getattr(module(f"vit_pytorch.{name}"), kind)(**given)
        yield library_case(f"vit_pytorch {name}", make, image(64))


def diffusers() -> Iterator[Case]:
    d = module("diffusers")
    small = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 4}
    transformer = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4}
    yield library_case(
        "diffusers UNet2D", lambda: d.UNet2DModel(
            sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), **small), noisy_image(3, 16),
    )  # fmt: skip
    yield library_case(
        "diffusers UNet2DCondition", lambda: d.UNet2DConditionModel(
            sample_size=16, cross_attention_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **small), noisy_image(4, 16, c=(5, 8)),
    )  # fmt: skip
    yield library_case(
        "diffusers DiT", lambda: d.DiTTransformer2DModel(
            num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4, **transformer),
        noisy_image(4, 8),
        lambda m, b: m(b["x"], timestep=b["t"], class_labels=b["t"]).sample,
    )  # fmt: skip
    yield library_case(
        "diffusers PixArt", lambda: d.PixArtTransformer2DModel(
            num_layers=1, cross_attention_dim=16, sample_size=8, caption_channels=8, norm_num_groups=4, **transformer),
        noisy_image(4, 8, c=(5, 8)), lambda m, b: m(
            b["x"], encoder_hidden_states=b["c"], timestep=b["t"],
            added_cond_kwargs={"resolution": None, "aspect_ratio": None}).sample,
    )  # fmt: skip
    yield library_case(
        "diffusers SD3", lambda: d.SD3Transformer2DModel(
            sample_size=8, patch_size=2, num_layers=2, joint_attention_dim=8, caption_projection_dim=16,
            pooled_projection_dim=8, pos_embed_max_size=8, **transformer), noisy_image(4, 8, c=(5, 8), p=8),
        lambda m, b: m(b["x"], encoder_hidden_states=b["c"], pooled_projections=b["p"], timestep=b["t"]).sample,
    )  # fmt: skip
    yield library_case(
        "diffusers Flux", lambda: d.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8)),
        lambda s: {"x": torch.randn(s.batch, 16, 4), "t": torch.rand(s.batch), "c": torch.randn(s.batch, 5, 8),
                   "p": torch.randn(s.batch, 8)}, flux,
    )  # fmt: skip
    for kind, more in (("AutoencoderKL", {}), ("VQModel", {"num_vq_embeddings": 8})):
        yield library_case(
            f"diffusers {kind}", lambda kind=kind, more=more: getattr(d, kind)(
                block_out_channels=(8, 8), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2, **more), image(16),
        )  # fmt: skip


def flux(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Positions are one table for the batch, of 16 rows: 4 samples' by the look of them, so they are marked."""
    import fastdp

    places = [fastdp.mark_rows(torch.zeros(n, 3), None) for n in (16, 5)]
    return model(
        batch["x"], encoder_hidden_states=batch["c"], pooled_projections=batch["p"], timestep=batch["t"],
        img_ids=places[0], txt_ids=places[1],
    ).sample  # fmt: skip


def monai() -> Iterator[Case]:
    n = module("monai.networks.nets")
    flat: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    swept: list[tuple[str, int, dict[str, Any]]] = [
        ("UNet", 32, {**flat, "channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1}),
        ("UNETR", 32, {**flat, "img_size": (32, 32), "feature_size": 8, "hidden_size": 16, "mlp_dim": 32,
                       "num_heads": 2}),
        ("SwinUNETR", 64, {**flat, "feature_size": 12, "depths": (1,) * 4, "num_heads": (1, 1, 2, 2)}),
        ("SegResNet", 32, {**flat, "init_filters": 8}),
        ("AttentionUnet", 32, {**flat, "channels": (4, 8), "strides": (2,)}),
        ("DynUNet", 32, {**flat, "kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2),
                         "filters": (4, 8, 16)}),
    ]  # fmt: skip
    for name, size, given in swept:
        make = lambda name=name, given=given: getattr(n, name)(**given)
        yield library_case(f"monai {name}", make, image(size, 1))


def segmentation() -> Iterator[Case]:
    smp = module("segmentation_models_pytorch")
    for name in ("Unet", "FPN", "DeepLabV3", "Linknet", "MAnet", "UPerNet", "Segformer"):
        make = lambda name=name: getattr(smp, name)("resnet18", encoder_weights=None, classes=3)
        yield library_case(f"segmentation_models {name}", make, image(64))


def open_clip() -> Iterator[Case]:
    o = module("open_clip")
    text = {"context_length": 8, "vocab_size": 23, "width": 16, "heads": 2, "layers": 1}
    seen = {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8}

    def pairs(s: Sizes) -> dict[str, Tensor]:
        return {"x": torch.randn(s.batch, 3, 32, 32), "w": torch.randint(0, 23, (s.batch, 8))}

    towers = lambda: o.CLIP(embed_dim=8, vision_cfg=seen, text_cfg=text)
    yield library_case("open_clip CLIP", towers, pairs, lambda m, b: torch.cat(m(*b.values())[:2], 1))
    yield library_case("open_clip encode_image", towers, image(), lambda m, b: m.encode_image(b["x"]))


def torchvision() -> Iterator[Case]:
    m = module("torchvision.models")
    for name, size in (("resnet18", 32), ("densenet121", 32), ("convnext_tiny", 32), ("swin_t", 32),
                       ("mobilenet_v3_small", 32), ("efficientnet_b0", 32), ("squeezenet1_1", 64), ("alexnet", 64),
                       ("shufflenet_v2_x0_5", 32), ("regnet_y_400mf", 32), ("mnasnet0_5", 32)):  # fmt: skip
        make = lambda name=name: getattr(m, name)(num_classes=5)
        yield library_case(f"torchvision {name}", make, image(size))


def other() -> Iterator[Case]:
    yield library_case(
        "denoising_diffusion_pytorch Unet", lambda: module("denoising_diffusion_pytorch").Unet(
            dim=8, dim_mults=(1, 2), flash_attn=False, attn_heads=2, attn_dim_head=4), noisy_image(3, 16),
    )  # fmt: skip
    yield library_case(
        "perceiver_pytorch", lambda: module("perceiver_pytorch").Perceiver(
            input_channels=3, input_axis=2, num_freq_bands=2, max_freq=4.0, depth=2, num_latents=4, latent_dim=16,
            cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8, num_classes=5, weight_tie_layers=True),
        features(8, 8, 3),
    )  # fmt: skip


LIBRARIES: dict[str, Callable[[], Iterator[Case]]] = {
    "vit_pytorch": vit_pytorch, "diffusers": diffusers, "monai": monai, "segmentation_models_pytorch": segmentation,
    "open_clip": open_clip, "torchvision": torchvision, "perceiver_pytorch": other,
}  # fmt: skip
