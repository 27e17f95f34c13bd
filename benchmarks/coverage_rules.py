"""Rules by which a configuration is shrunk: patterns of the names of fields, values for fields that are None, and,
where no rule will do, values by the name of the configuration."""

from __future__ import annotations

import re
from typing import Any

TOKEN = re.compile(r"(_token_(id|index)|_token_ids|_id|_index)$")
VOCABULARY = re.compile(r"vocab_size|n_vocab|codebook_size|num_embeddings$|vocabulary|_vocab$")
DEPTH = re.compile(
    r"(^|_)(num_(hidden_)?layers|n_layers?|layers|depth|num_blocks|n_blocks|num_hidden_layers|num_layer|"
    r"layers_per_block|num_self_attends_per_block|num_encoder_blocks|num_hidden_groups)$"
)
DEPTHS = re.compile(r"^(depths|num_blocks|layer_depths|block_repeats|blocks_per_stage)$")
HEADS = re.compile(r"(^|_)(num_(attention_)?heads|n_heads?|heads|num_.*_heads|attention_heads|num_head)$")
GROUPED = re.compile(r"key_value|kv_heads|num_kv")
HEAD_DIM = re.compile(r"head_dim|d_kv|d_head|dim_head|head_size|attention_head_size|rope_dim|rotary_dim$")
WIDTH = re.compile(
    r"hidden_size|hidden_dim|d_model|embed(ding)?_(dim|size)|n_embd|emb_dim|(^|_)dim$|width|d_ff|ffn|mlp_dim|"
    r"intermediate|feedforward|_dim$|_dims$|_rank$|inner|channels?$|units$|_size$|num_filters|attention_size|d_latents"
)
INNER = re.compile(r"intermediate|ffn|d_ff|mlp_dim|feedforward|n_inner|d_inner|fc_dim")
KEPT = re.compile(
    r"num_channels|^in_channels|in_chans|image_size|patch|kernel|window|stride|group|type_vocab|chunk|mel|feature_size|"
    r"input_size|pool|context|block|grid|merge|audio_channels|crop|tubelet|input_channels|output_channels_|temporal|"
    r"ratio|pretrain|input_feat|sample|num_labels|length|coordinate"
)
POSITIONS = re.compile(r"position|max_seq|n_ctx|n_positions|max_source|max_target|seq_len")
EXPERTS = re.compile(r"num_(local_|routed_)?experts$|n_routed_experts|moe_num_experts|num_experts$")
OFF = re.compile(r"drop|stochastic|mask_time_prob|mask_feature_prob|jitter|layerdrop|noise|z_loss")
COUNTS = re.compile(
    r"num_queries|num_query|num_latents|num_denoising|num_negatives|n_latents|train_num_points|max_bins"
)

# ---------------------------------------------------------------------- fields that are None

# Many models compute None away; where one does not, the profile "filled" gives it these.
FILL: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "expert_intermediate_size": 48,
    "sliding_window": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "decoder_hidden_size": 32,
    "decoder_depth": 1,
    "decoder_num_heads": 4,
    "default_language": "en_XX",
    "image_token_index": 120,
    "image_token_id": 120,
    "video_token_index": 121,
    "rope_theta": 10000.0,
    "layer_types": "full_attention",  # for each layer
    "mlp_layer_types": "dense",
}

# ---------------------------------------------------------------------- what no rule knows

KNOWN: dict[str, dict[str, Any]] = {
    "ReformerConfig": dict(axial_pos_embds=False, attn_layers=["local", "local"], num_hidden_layers=2),
    "LEDConfig": dict(attention_window=[8, 8], max_encoder_position_embeddings=64),
    "LongformerConfig": dict(attention_window=[8, 8]),
    "Sapiens2HeadConfig": dict(upsample_out_channels=[16, 16], conv_out_channels=[16], use_pixel_shuffle=False),
    "PerceiverConfig": dict(num_cross_attention_heads=1, num_self_attention_heads=4),
    "Blip2QFormerConfig": dict(use_qformer_text_input=True),
    "ShieldGemma2Config": dict(yes_token_index=40, no_token_index=41),
    "MimiConfig": dict(upsample_groups=8),
    "EfficientNetConfig": dict(width_coefficient=1.0, depth_coefficient=0.5, hidden_dim=1280),
    "AlignVisionConfig": dict(width_coefficient=1.0, depth_coefficient=0.5, hidden_dim=1280),
    "LongcatFlashConfig": dict(qk_head_dim=16, head_dim=8),
    "ChameleonConfig": dict(vocabulary_map={"<image>": 120}),
    "BeitConfig": dict(num_hidden_layers=4, out_indices=[1, 2, 3, 4]),
    "Molmo2AdapterConfig": dict(vision_feature_layer=[1, 0]),
    "DbrxAttentionConfig": dict(rope_theta=1e4, clip_qkv=8.0),
    "ZambaConfig": dict(num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"]),
    "MoonshineStreamingConfig": dict(num_key_value_heads=4),
    "CohereCompassTextConfig": dict(rope_parameters={"full_attention": dict(rope_type="default", rope_theta=1e4)}),
    "Glm5NextTextConfig": dict(index_topk=16),
    "VitMatteConfig": dict(fusion_hidden_sizes=[32, 32, 32, 32], convstream_hidden_sizes=[16, 32, 32]),
}
