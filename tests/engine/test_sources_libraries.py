"""Models as transformers, peft and accelerate hand them out: checkpointing, adapters, hooks, accumulation loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import ParameterError

from ..cases import shake, square
from ..truth import compare, norms_of, truth

B, T, V = 3, 7, 23
TOLERANCE = 1e-5


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return shake(transformers.LlamaForCausalLM(config)).train()


def ids() -> Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))


def norms_with_checkpoints(model: nn.Module, reentrant: bool) -> tuple[Tensor, Tensor]:
    """Norms of the checkpointed model, and the truth of the same model without checkpoints."""
    exact = norms_of(truth(model, ids(), token_losses))
    calls = []
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    block = next(m for m in model.modules() if type(m).__name__ in ("GPT2Block", "LlamaDecoderLayer"))
    next(block.children()).register_forward_pre_hook(lambda *_: calls.append(1))
    engine = fastdp.PerSampleGradients(model)
    try:
        token_losses(model, ids()).mean().backward()
        assert len(calls) >= 2, "nothing was computed again: no checkpoint"
        return engine.norms().double(), exact
    finally:
        engine.detach()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    found, exact = norms_with_checkpoints(llama(), reentrant)
    torch.testing.assert_close(found, exact, rtol=TOLERANCE, atol=0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_lora_with_gradient_checkpointing(reentrant: bool) -> None:
    """The base is frozen, so that only the hook of enable_input_require_grads lets reentrant checkpoints backward."""
    peft = pytest.importorskip("peft")
    base = llama()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]))
    model = shake(model).train()
    model.enable_input_require_grads()
    found, exact = norms_with_checkpoints(model, reentrant)
    assert bool((exact > 0).all())
    torch.testing.assert_close(found, exact, rtol=TOLERANCE, atol=0)


# --------------------------------------------------------------------------- accelerate


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def test_hooks_that_move_modules() -> None:
    """device_map: every module's forward is replaced by one that moves its inputs and outputs."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(mlp(), {"0": "cpu", "1": "cpu", "2": "cpu"}, force_hooks=True)
    assert hasattr(model[0], "_hf_hook")
    assert compare(model, torch.randn(B, 8), square).worst < TOLERANCE


def test_offloaded_parameters() -> None:
    """Trainable ones are refused, before and after the optimizer was made; a frozen base may be offloaded."""
    accelerate = pytest.importorskip("accelerate")
    model = mlp()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=B)
    accelerate.cpu_offload(model, torch.device("cpu"))
    square(model, torch.ones(B, 8)).mean().backward()
    with pytest.raises(ParameterError, match="replaced since the optimizer was made"):
        optimizer.step()
    optimizer.detach()
    with pytest.raises(ParameterError, match="offload"):
        fastdp.PerSampleGradients(model)
    plain = nn.Sequential(mlp().requires_grad_(False), nn.Linear(4, 4))
    exact = norms_of(truth(plain, torch.ones(B, 8), square))
    accelerate.cpu_offload(plain[0], torch.device("cpu"))
    engine = fastdp.PerSampleGradients(plain)
    square(plain, torch.ones(B, 8)).mean().backward()
    torch.testing.assert_close(engine.norms().double(), exact, rtol=TOLERANCE, atol=0)


def adapters() -> dict[str, Any]:
    """Of PEFT, on a linear layer "a" of 8 to 8."""
    peft = pytest.importorskip("peft")
    on: dict[str, Any] = {"target_modules": ["a"]}
    return {
        "loha": peft.LoHaConfig(r=2, **on), "lokr": peft.LoKrConfig(r=2, **on),
        "dora": peft.LoraConfig(r=2, use_dora=True, **on), "oft": peft.OFTConfig(oft_block_size=4, r=0, **on),
        "boft": peft.BOFTConfig(boft_block_size=4, **on), "vera": peft.VeraConfig(r=2, **on),
        "ia3": peft.IA3Config(feedforward_modules=[], **on), "hra": peft.HRAConfig(r=2, **on),
        "fourier": peft.FourierFTConfig(n_frequency=5, **on),
        "loha, convolution": peft.LoHaConfig(r=2, use_effective_conv2d=True, target_modules=["c"]),
    }  # fmt: skip


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.a, self.b = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 1, 2, 2]
        return self.b(self.a(self.c(x).flatten(1).tanh()).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["loha", "lokr", "dora", "oft", "boft", "vera", "ia3", "hra", "fourier",
                                  "loha, convolution"])  # fmt: skip
def test_adapters_of_peft(kind: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = shake(peft.get_peft_model(Adapted(), adapters()[kind]))
    assert compare(model, torch.randn(5, 1, 2, 2), lambda m, x: m(x).square().sum(1)).worst < TOLERANCE
