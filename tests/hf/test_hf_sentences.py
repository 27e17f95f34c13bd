"""sentence-transformers' trainer with private steps: exact by hand; losses that couple samples are refused by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ..hf_models import TINY, error, transformers, weights
from ..hf_texts import draw, ids, private, tokenizer, truth

pytestmark = pytest.mark.slow  # `make test-all` runs it

sentence_transformers = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")

from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402

from fastdp.accounting import default_delta  # noqa: E402
from fastdp.errors import StepError  # noqa: E402
from fastdp.hf import DPSentenceTransformerTrainer, DPTrainer, argument_table, arguments  # noqa: E402
from fastdp.hf.sentences import COUPLING  # noqa: E402

Arguments = sentence_transformers.SentenceTransformerTrainingArguments


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny encoder with its tokenizer, as saved."""
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    options = {**TINY, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 27}
    transformers.BertModel(transformers.BertConfig(**options)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def encoder(folder):
    text = modules.Transformer(folder)
    return sentence_transformers.SentenceTransformer(modules=[text, modules.Pooling(16)], device="cpu").double()


def records(count=8, columns=2, label=True):
    found = {f"sentence{n}": draw(count, 2, 9, n) for n in range(columns)}
    return datasets.Dataset.from_dict({**found, **({"label": [n / count for n in range(count)]} if label else {})})


def trainer(tmp_path, model, loss, data, privacy=None, more=None, **options):
    common = dict(output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=1, learning_rate=0.1, optim="sgd",
                  lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
                  logging_strategy="no")  # fmt: skip
    return DPSentenceTransformerTrainer(
        model=model, args=Arguments(**{**common, **options}), train_dataset=data, loss=loss,
        privacy=privacy or private(), **(more or {}),
    )  # fmt: skip


def embedding(model, text):
    tokens = torch.tensor([ids(text)])
    return model[0].model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state.mean(1)


def cosine(model, data):
    def loss(row):
        found = torch.cosine_similarity(embedding(model, row["sentence0"]), embedding(model, row["sentence1"]))
        return (found - row["label"]).square().mean()

    return [lambda row=row: loss(row) for row in data]


def triplet(model, data):
    def loss(row):
        one, good, bad = (embedding(model, row[f"sentence{n}"]) for n in range(3))
        return torch.relu((one - good).norm(dim=1) - (one - bad).norm(dim=1) + 5).mean()

    return [lambda row=row: loss(row) for row in data]


@pytest.mark.parametrize("kind", ["cosine", "triplet", "matryoshka"])
def test_a_step_by_hand(kind, folder, tmp_path):
    model = encoder(folder)
    data = records(columns=3, label=False) if kind == "triplet" else records()
    if kind == "triplet":
        loss, by_hand = losses.TripletLoss(model), triplet(model, data)
    else:
        loss, by_hand = losses.CosineSimilarityLoss(model), cosine(model, data)
    if kind == "matryoshka":
        loss = losses.MatryoshkaLoss(model, loss, [16])
    want, norm = truth(model, by_hand, 0.1)
    before = weights(model)
    made = trainer(tmp_path, model, loss, data, private(per_sample_max_grad_norm=norm))
    made.train()
    assert error(weights(model), want, before) < 1e-6
    assert made.history == [(0.0, 1.0, 1)]


def test_persons_logs_and_the_card(folder, tmp_path):
    """The persons' column is no text, in evaluation neither; no record stands in what is saved."""
    model = encoder(folder).float()
    data = records(12).add_column("user", ["q q q", *[f"u{n // 2}" for n in range(11)]])
    data = data.select_columns(["user", "sentence0", "sentence1", "label"])
    made = trainer(
        tmp_path, model, losses.CosineSimilarityLoss(model), data,
        private(noise_multiplier=1.0, sample_rate=0.3, group_by="user"), {"eval_dataset": data.select(range(4))},
        max_steps=4, logging_strategy="steps", logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=4,
    )  # fmt: skip
    made.train()
    assert made.history == [(1.0, 0.3, 4)] and made.delta() == default_delta(len(set(data["user"])))
    made.save_model()
    for entry in made.state.log_history:
        if "loss" in entry:
            assert set(entry) <= {"loss", "learning_rate", "epoch", "step", "epsilon", "noise_multiplier"}
    cards = list(tmp_path.rglob("README.md"))
    assert cards and (tmp_path / "privacy.json").exists()
    for card in cards:
        text = card.read_text()
        assert not [t for column in ("sentence0", "sentence1") for t in data[column] if len(t) > 4 and t in text]


@pytest.mark.parametrize("name", [n for n in COUPLING if not n.startswith(("Cached", "GIST", "ContrastiveTension"))])
def test_losses_that_couple_are_refused(name, folder, tmp_path):
    model = encoder(folder)
    made = getattr(losses, name)(model)
    with pytest.raises(StepError, match=f"{name} couples samples.*CosineSimilarityLoss"):
        trainer(tmp_path, model, made, records())
    if name == "MultipleNegativesRankingLoss":
        with pytest.raises(StepError, match="MatryoshkaLoss couples samples.*negatives"):
            trainer(tmp_path, model, losses.MatryoshkaLoss(model, made, [16, 8]), records())


def test_every_loss_is_known():
    """Of the installed version: a new one that combines a batch is found by its code, or by verification."""
    named = {n for n in losses.__all__ if n.endswith("Loss") or n.endswith("Negatives")}
    means = {"CosineSimilarityLoss", "ContrastiveLoss", "TripletLoss", "MarginMSELoss", "DistillKLDivLoss",
             "EmbedDistillLoss", "MSELoss", "MatryoshkaLoss", "SoftmaxLoss"}  # fmt: skip
    judged = {"AdaptiveLayerLoss", "Matryoshka2dLoss", "ContrastiveTensionLoss", "DenoisingAutoEncoderLoss"}
    if sentence_transformers.__version__.startswith("6.2."):
        assert named == set(COUPLING) | means | judged


def test_other_refusals(folder, tmp_path):
    model = encoder(folder)
    with pytest.raises(StepError, match="the default loss, CoSENTLoss, couples samples"):
        trainer(tmp_path, model, None, records())
    with pytest.raises(StepError, match="SoftmaxLoss has parameters of its own .classifier"):
        trainer(tmp_path, model, losses.SoftmaxLoss(model, 16, 3), records())
    with pytest.raises(StepError, match="no mean over the batch"):
        trainer(tmp_path, model, losses.ContrastiveLoss(model, size_average=False), records())
    with pytest.raises(StepError, match="several training datasets"):
        trainer(tmp_path, model, losses.CosineSimilarityLoss(model), {"a": records()})
    with pytest.raises(arguments.ArgumentError, match="batch_sampler=.*refused: Poisson"):
        trainer(tmp_path, model, losses.CosineSimilarityLoss(model), records(), batch_sampler="no_duplicates")
    with pytest.raises(arguments.ArgumentError, match="graphed=True needs one loss a sample"):
        trainer(tmp_path, model, losses.CosineSimilarityLoss(model), records(), private(graphed=True))
    with pytest.raises(StepError, match="use fastdp.hf.DPSentenceTransformerTrainer"):
        type("Mine", (DPTrainer, sentence_transformers.SentenceTransformerTrainer), {})


def test_the_table_is_complete():
    fields = {f.name for f in dataclasses.fields(Arguments)}
    table = argument_table.fields_of(Arguments)
    if sentence_transformers.__version__.startswith("6.2."):
        assert fields == set(table)
    assert all(f.why for f in table.values() if f.status != "supported")
