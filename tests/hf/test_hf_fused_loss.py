"""DPTrainer with fused_loss=True: the steps of stored logits; what has another head is refused with the reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastdp.errors import StepError
from fastdp.grad_sample.head_loss import HeadLoss
from fastdp.losses import causal_lm_loss
from fastdp.losses.language_model_head import FusedHead

from ..hf_models import (
    Collate,
    bert,
    error,
    gpt2,
    middle_norm,
    private,
    texts,
    trainer_of,
    transformers,
    truth_of_step,
    weights,
)

TINY = dict(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
            eos_token_id=2)  # fmt: skip
KINDS = {
    "Llama": {}, "Gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0}, "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.3}, "GPTNeoX": {}, "Phi": {},
}  # fmt: skip


def model_of(kind, **more):
    torch.manual_seed(0)
    options = {**TINY, **KINDS.get(kind, {}), **more}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**options)).eval()


@pytest.mark.parametrize("kind", [*KINDS, "GPT2"])
def test_losses_and_gradients_are_those_of_the_logits(kind):
    model = gpt2().eval() if kind == "GPT2" else model_of(kind)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    batch = Collate()(texts(4, "next"))
    labels = batch.pop("labels")
    fused = FusedHead(model)
    fused.check(model, batch)
    found = fused.losses(model, batch, labels, 0.1)
    exact = causal_lm_loss(model(**batch).logits, labels, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    named = [p for p in model.parameters() if p.requires_grad]
    pairs = [torch.autograd.grad(loss.sum(), named, allow_unused=True) for loss in (found, exact)]
    for own, true in zip(*pairs, strict=True):
        assert (own is None) == (true is None)
        if own is not None:
            torch.testing.assert_close(own, true, rtol=1e-4, atol=1e-5)
    assert "forward" not in model.get_output_embeddings().__dict__


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Gemma2"])
def test_a_step_is_the_truth(tmp_path, kind, monkeypatch):
    model, records = gpt2() if kind == "GPT2" else model_of(kind), texts(8, "next")
    norm, before = middle_norm(model, records), weights(model)
    truth = truth_of_step(model, records, 8, 0.1, norm)
    uses = []
    own = HeadLoss.__init__
    monkeypatch.setattr(HeadLoss, "__init__", lambda self, *given: uses.append(self) or own(self, *given))
    options = private(fused_loss=True, sample_rate=1.0, per_sample_max_grad_norm=norm)
    trainer = trainer_of(tmp_path, model, records, options, Collate(), max_steps=1, per_device_train_batch_size=8)
    trainer.train()
    assert error(weights(model), truth, before) < 1e-4 and uses


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        model_of("Llama"), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    ).eval()
    batch = Collate()(texts(4, "next"))
    labels = batch.pop("labels")
    fused = FusedHead(model)
    fused.check(model, batch)
    exact = causal_lm_loss(model(**batch).logits, labels, reduction="none")
    torch.testing.assert_close(fused.losses(model, batch, labels), exact, rtol=1e-5, atol=1e-6)


class Squashed(transformers.LlamaForCausalLM):
    """A model that does something to its logits that no configuration says."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = 50 * torch.tanh(outputs.logits / 50)
        return outputs


def test_unknown_heads_are_refused(tmp_path):
    batch = Collate()(texts(4, "next"))
    batch.pop("labels")
    model = Squashed(model_of("Llama").config).eval()
    with pytest.raises(StepError, match="changes its logits behind the head"):
        FusedHead(model).check(model, batch)
    model = model_of("Llama")
    model.lm_head = nn.Sequential(nn.Linear(16, 40))
    with pytest.raises(StepError, match="a head of the kind Sequential"):
        FusedHead(model)
    with pytest.raises(StepError, match="no output embeddings"):
        FusedHead(nn.Linear(2, 2))
    other = copy.deepcopy(model_of("Llama"))
    other.get_output_embeddings = lambda: nn.Linear(16, 40)
    with pytest.raises(StepError, match="makes"):
        FusedHead(other).check(other, batch)


def test_what_does_not_go_with_it(tmp_path):
    with pytest.raises(ValueError, match="leave one of them out"):
        private(fused_loss=True, graphed=True)
    trainer = trainer_of(tmp_path, bert(num_labels=3), texts(8), private(fused_loss=True), max_steps=1)
    with pytest.raises(StepError, match="fuses the head of a causal language model"):
        trainer.train()
