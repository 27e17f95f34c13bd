"""Known architectures of transformers, and the ways they are trained: padded, checkpointed, adapted, in 16 bits, ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from . import coverage_generic as generic
from .coverage_truth import Built, Case, Sizes, shake

ARCHITECTURES = {
    "bert": "BertForSequenceClassification",
    "bert_mlm": "BertForMaskedLM",
    "roberta": "RobertaForSequenceClassification",
    "distilbert": "DistilBertForMaskedLM",
    "albert": "AlbertForSequenceClassification",
    "deberta": "DebertaV2ForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "phi": "PhiForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "swin": "SwinForImageClassification",
    "convnext": "ConvNextForImageClassification",
    "resnet": "ResNetForImageClassification",
    "beit": "BeitForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
    "wav2vec2": "Wav2Vec2ForCTC",
    "clip": "CLIPModel",
    "clip_vision": "CLIPForImageClassification",
    "detr": "DetrForObjectDetection",
    "segformer": "SegformerForImageClassification",
    "llava": "LlavaForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
}
Change = Callable[[nn.Module, dict[str, Any]], nn.Module]


def changed(name: str, class_name: str, change: Change, tolerance: float = 1e-4, wrap: Any = None) -> Case:
    """The architecture after `change` of model and batch; wrap: losses -> losses."""

    def build(sizes: Sizes) -> Built:
        model, batch, losses = generic.build(class_name, sizes)
        torch.manual_seed(8)
        model = change(model, batch)
        return model.train(), batch, losses if wrap is None else wrap(losses)

    return Case(name, build, tolerance, text=True)


def padded(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -2:] = 0
    batch["attention_mask"] = mask
    return model


def padded_left(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    padded(model, batch)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    return model


def checkpointed(reentrant: bool) -> Change:
    def change(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        return model

    return change


def head_only(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    model.base_model.requires_grad_(False)
    return model


def tied(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def untied(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone().mul_(0.9))
    return model


def channels_last(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    batch["pixel_values"] = batch["pixel_values"].contiguous(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last)


def group_norm(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(1, part.num_features))
    return shake(model)


def eager(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    model.set_attn_implementation("eager")
    return model


def experts_by_loop(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    model.set_experts_implementation("eager")
    return model


def adapted(kind: str, **options: Any) -> Change:
    """By PEFT; only what it adds is trained."""

    def change(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
        import peft

        config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
        return shake(peft.get_peft_model(model, config))

    return change


def under_autocast(losses: Any) -> Any:
    def cast(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = losses(model, batch)
        return found if found.dtype is torch.float64 else found.float()

    return cast


def by_functional_call(losses: Any) -> Any:
    class Called(nn.Module):
        """The model called with a dictionary of its own parameters."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.__dict__["model"] = model

        def forward(self, **batch: Any) -> Any:
            return functional_call(self.model, dict(self.model.named_parameters()), (), batch)

    return lambda model, batch: losses(Called(model), batch)


def same(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    return model


def cases() -> dict[str, Case]:
    gpt2, llama, bert, vit = (ARCHITECTURES[n] for n in ("gpt2", "llama", "bert", "vit"))
    lora = dict(r=4, lora_dropout=0.0)
    found = [changed(name, class_name, same) for name, class_name in ARCHITECTURES.items()]
    found += [changed(f"{n}_padded", ARCHITECTURES[n], padded) for n in ("bert", "llama", "t5", "gpt2", "mamba")]
    found += [changed(f"{n}_padded_left", ARCHITECTURES[n], padded_left) for n in ("llama", "gpt2")]
    found += [
        changed(f"{n}_checkpointed{'_reentrant' if again else ''}", ARCHITECTURES[n], checkpointed(again))
        for n in ("gpt2", "llama", "bert", "t5")
        for again in (False, True)
    ]
    found += [changed(f"{n}_eager", ARCHITECTURES[n], eager) for n in ("bert", "llama", "vit")]
    found += [
        changed("gpt2_untied", gpt2, untied),
        changed("llama_tied", llama, tied),
        changed("mixtral_loop", ARCHITECTURES["mixtral"], experts_by_loop),
        changed("resnet_group_norm", ARCHITECTURES["resnet"], group_norm),
        changed("convnext_channels_last", ARCHITECTURES["convnext"], channels_last),
        changed("vit_head_only", vit, head_only),
        changed("bert_head_only", bert, head_only),
        changed(
            "gpt2_lora", gpt2, adapted("LoraConfig", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **lora)
        ),
        changed("llama_lora", llama, adapted("LoraConfig", target_modules=["q_proj", "v_proj"], **lora)),
        changed("llama_dora", llama, adapted("LoraConfig", target_modules=["q_proj", "v_proj"], use_dora=True, **lora)),
        changed(
            "llama_lora_embedding", llama, adapted("LoraConfig", target_modules=["embed_tokens", "lm_head"], **lora)
        ),
        changed(
            "llama_ia3",
            llama,
            adapted("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        ),
        changed("llama_prefix", llama, adapted("PrefixTuningConfig", num_virtual_tokens=3)),
        changed("llama_prompt", llama, adapted("PromptTuningConfig", num_virtual_tokens=3)),
        changed(
            "mixtral_lora", ARCHITECTURES["mixtral"], adapted("LoraConfig", target_modules=["q_proj", "v_proj"], **lora)
        ),
        changed("bert_autocast", bert, same, 0.05, under_autocast),
        changed("llama_autocast", llama, same, 0.05, under_autocast),
        changed("vit_autocast", vit, same, 0.05, under_autocast),
        changed("gpt2_functional_call", gpt2, same, wrap=by_functional_call),
        changed("vit_functional_call", vit, same, wrap=by_functional_call),
    ]
    return {case.name: case for case in found}
