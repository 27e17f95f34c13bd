"""Adapters of PEFT on a tiny Llama, on plain and on quantised bases: docs/adapters.md has the errors as a table.

Bases of bitsandbytes and torchao run where these are installed; no extra of fastdp needs them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import ParameterError, SampleMixingError

from ..cases import shake
from ..truth import Comparison, against, compare, take, truth

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5")

V, T = 23, 7
TOLERANCE = 1e-5
ATTENTION = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
LAYERS = {**ATTENTION, "target_modules": ["q_proj", "v_proj", "up_proj"]}
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 2, **LAYERS}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, **LAYERS}),
    "rsLoRA, embeddings": (
        "LoraConfig", {"r": 2, "use_rslora": True, **ATTENTION, "target_modules": ["q_proj", "embed_tokens"]}
    ),
    "LoRA, whole head": ("LoraConfig", {"r": 2, "modules_to_save": ["lm_head"], **LAYERS}),
    "LoRA, tokens": ("LoraConfig", {"r": 2, "trainable_token_indices": [1, 2, 5], **LAYERS}),
    "tokens": ("TrainableTokensConfig", {"token_indices": [1, 2], **ATTENTION, "target_modules": ["embed_tokens"]}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 3, "target_r": 2, "total_step": 10, **LAYERS}),
    "VeRA": ("VeraConfig", {"r": 2, **ATTENTION}),
    "RandLoRA": ("RandLoraConfig", {"r": 2, "randlora_alpha": 2, **ATTENTION}),
    "VB-LoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 6, "vector_length": 4, "topk": 2, **LAYERS}),
    "DeLoRA": ("DeloraConfig", {"r": 2, **LAYERS}),
    "GraLoRA": ("GraloraConfig", {"r": 4, "gralora_k": 2, **LAYERS}),
    "HiRA": ("HiraConfig", {"r": 2, **LAYERS}),
    "LoHa": ("LoHaConfig", {"r": 2, **LAYERS}),
    "LoKr": ("LoKrConfig", {"r": 2, **LAYERS}),
    "IA3": ("IA3Config", {"feedforward_modules": ["up_proj"], **LAYERS}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0, **LAYERS}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, **LAYERS}),
    "HRA": ("HRAConfig", {"r": 2, **LAYERS}),
    "PSOFT": ("PsoftConfig", {"r": 4, **ATTENTION}),
    "RoAd": ("RoadConfig", {"group_size": 8, **LAYERS}),
    "C3A": ("C3AConfig", {"block_size": 4, **ATTENTION}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 5, "scaling": 10.0, **LAYERS}),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 8, **ATTENTION}),
    "SHiRA": ("ShiraConfig", {"r": 2, **LAYERS}),
    "MiSS": ("MissConfig", {"r": 2, **LAYERS}),
    "LN tuning": ("LNTuningConfig", {**LAYERS, "target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "prompt tuning": ("PromptTuningConfig", PROMPT),
    "prefix tuning": ("PrefixTuningConfig", PROMPT),
    "prefix tuning, projected": ("PrefixTuningConfig", {"prefix_projection": True, "encoder_hidden_size": 8, **PROMPT}),
    "P-tuning": ("PromptEncoderConfig", {"encoder_hidden_size": 8, **PROMPT}),
    "Llama-Adapter": ("AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 1, "task_type": "CAUSAL_LM"}),
}  # fmt: skip


def llama(hidden: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(  # type: ignore[no-any-return]
        transformers.LlamaConfig(
            vocab_size=V, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def texts() -> dict[str, Tensor]:
    """Of different lengths; each holds token 1."""
    ids = torch.randint(2, V, (4, T), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 1
    mask = (torch.arange(T) < torch.tensor([7, 5, 6, 4])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over each text's own tokens; virtual tokens stand before them."""
    kept = batch["attention_mask"][:, 1:].float()
    logits = model(**batch, use_cache=False).logits[:, -T:-1]
    each = F.cross_entropy(logits.mT, batch["input_ids"][:, 1:], reduction="none") * kept
    return each.sum(1) / kept.sum(1)


def adapted(base: nn.Module, kind: str) -> nn.Module:
    torch.manual_seed(0)
    config, options = ADAPTERS[kind]
    if not hasattr(peft, config):
        pytest.skip(f"this peft has no {config}")
    model = peft.get_peft_model(base, getattr(peft, config)(**options))
    shake(nn.ParameterList(p for p in model.parameters() if p.requires_grad))
    return model.train()  # type: ignore[no-any-return]


def assert_exact(found: Comparison, what: str) -> None:
    print(f"{what}: norms {found.norms:.0e}, sums {found.clipped_sum:.0e}")
    assert max(found.too_small, found.clipped_sum, found.per_sample) < TOLERANCE
    assert found.norms < (1e-4 if what == "tokens" else TOLERANCE)  # a repeated id's norm is enlarged by its rounding


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_norms_and_sums_are_those_of_single_samples(kind: str) -> None:
    assert_exact(compare(adapted(llama(), kind), texts(), losses), kind)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_mixes_samples_is_refused() -> None:
    """Lily weighs its experts by the mean of the router over the batch."""
    if not hasattr(peft, "LilyConfig"):
        pytest.skip("this peft has no Lily")
    model = peft.get_peft_model(llama(), peft.LilyConfig(r=2, **ATTENTION))
    with pytest.raises(SampleMixingError, match=r"mean\(\).*q_proj"):
        compare(model, texts(), losses)


@pytest.mark.filterwarnings("ignore")
def test_adalora_chooses_ranks_by_private_gradients() -> None:
    """`update_and_allocate` reads `.grad`: nothing is there before the step, the noised gradient after it."""
    options = {"init_r": 3, "target_r": 1, "total_step": 10, "tinit": 0, "tfinal": 5, "deltaT": 1}
    model = peft.get_peft_model(llama(), peft.AdaLoraConfig(**options, **ATTENTION)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = fastdp.DPAdamW(model, lr=1e-3, noise_multiplier=1.0, expected_batch_size=4)
    for step in range(1, 7):
        losses(model, texts()).mean().backward()
        assert all(p.grad is None for p in trained)
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
    ranks = [int((p != 0).sum()) for name, p in model.named_parameters() if "lora_E" in name]
    assert sum(ranks) == len(ranks), "the budget is a rank of one on average"


# --------------------------------------------------------------------------- quantised bases


def quantised(folder: Path, kind: str) -> nn.Module:
    """The base as transformers loads it."""
    llama(hidden=64).save_pretrained(folder)  # type: ignore[operator]
    if kind.endswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
        options: dict[str, Any] = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
        if kind.startswith("nf4"):
            options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
                       "bnb_4bit_compute_dtype": torch.float32}  # fmt: skip
        config = transformers.BitsAndBytesConfig(**options)
    else:
        torchao = pytest.importorskip("torchao.quantization")
        by_group = {"weight_dtype": torch.int4, "granularity": torchao.PerGroup(32)}
        config = transformers.TorchAoConfig(
            {
                "int8, torchao": torchao.Int8WeightOnlyConfig,
                "int4, torchao": lambda: torchao.IntxWeightOnlyConfig(**by_group),
                "float8, torchao": torchao.Float8WeightOnlyConfig,
            }[kind]()
        )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


def dequantised(model: nn.Module) -> nn.Module:
    """The same numbers in plain linear layers: the truth needs no quantised kernel, and may be float64."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        weight: Any = module.weight if isinstance(module, nn.Linear) else None
        if hasattr(weight, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            weight = dequantize_4bit(weight.data, weight.quant_state)
        elif hasattr(weight, "qdata"):
            weight = weight.dequantize()
        else:
            continue
        plain = nn.Linear(weight.size(1), weight.size(0), bias=False)
        plain.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
        model.set_submodule(name, plain)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["nf4, bitsandbytes", "int8, torchao", "int4, torchao", "float8, torchao"])
def test_lora_on_a_quantised_base(kind: str, tmp_path: Path) -> None:
    model = adapted(quantised(tmp_path, kind), "LoRA")
    assert_exact(against(truth(dequantised(model), texts(), losses), model, texts(), losses), kind)


@pytest.mark.filterwarnings("ignore")
def test_lora_on_int8_of_bitsandbytes(tmp_path: Path) -> None:
    """It rounds activations, too, row by row: the truth is its own gradient of single samples, in float32."""
    model = adapted(quantised(tmp_path, "int8, bitsandbytes"), "LoRA")
    assert_exact(compare(model, texts(), losses, double=False), "int8, bitsandbytes")


@pytest.mark.filterwarnings("ignore")
def test_outliers_of_int8_mix_samples() -> None:
    """On CUDA, `threshold` (6 by default) takes a column out of int8 for all rows if one of them is large in it."""
    functions = pytest.importorskip("bitsandbytes.autograd._functions")
    from bitsandbytes.functional import int8_vectorwise_quant

    class Int8(nn.Module):
        def __init__(self, threshold: float) -> None:
            super().__init__()
            self.up, self.codes = nn.Linear(64, 64), int8_vectorwise_quant(torch.randn(64, 64).half() / 8)[:2]
            self.state = functions.MatmulLtState()
            self.state.threshold, self.state.has_fp16_weights = threshold, False
            self.state.CB, self.state.SCB = self.codes

        def forward(self, x: Tensor) -> Tensor:
            return functions.MatMul8bitLt.apply(self.up(x), self.state.CB, None, None, self.state)  # type: ignore

    x = torch.randn(4, 5, 64)
    x[0] *= 50
    assert compare(Int8(0.0), x, lambda m, x: m(x).square().mean((1, 2)), double=False).worst < TOLERANCE
    with pytest.raises(SampleMixingError, match="int8_vectorwise_quant"):
        compare(Int8(6.0), x, lambda m, x: m(x).square().mean((1, 2)), double=False)


def prepared(folder: Path, reentrant: bool | None) -> nn.Module:
    """As `prepare_model_for_kbit_training` leaves it, with checkpoints of this kind, or without."""
    kind = None if reentrant is None else {"use_reentrant": reentrant}
    base = quantised(folder, "nf4, bitsandbytes")
    for module in base.modules():
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return peft.prepare_model_for_kbit_training(base, kind is not None, kind)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_qlora(reentrant: bool | None, tmp_path: Path) -> None:
    """After an evaluation. Of bitsandbytes 0.50, that of a CPU with AVX512-BF16 would pack the base for good, and no
    gradient goes through what is packed."""
    plain = dequantised(adapted(prepared(tmp_path, None), "LoRA"))
    model = adapted(prepared(tmp_path, reentrant), "LoRA")
    with torch.no_grad():
        losses(model.eval(), take(texts(), [0, 1]))
    calls: list[int] = []
    model.train().get_submodule("base_model.model.model.layers.0.mlp").register_forward_pre_hook(
        lambda *_: calls.append(1)
    )
    assert_exact(against(truth(plain, texts(), losses), model, texts(), losses), f"QLoRA, reentrant: {reentrant}")
    assert len(calls) == (1 if reentrant is None else 2)


@pytest.mark.filterwarnings("ignore")
def test_preparing_the_adapted_model_freezes_the_adapter(tmp_path: Path) -> None:
    model = peft.prepare_model_for_kbit_training(adapted(quantised(tmp_path, "nf4, bitsandbytes"), "LoRA"))
    with pytest.raises(ParameterError, match="no trainable parameter"):
        fastdp.DPAdamW(model, lr=1e-3, noise_multiplier=1.0)
