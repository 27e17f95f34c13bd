"""The models of docs/finetuning.md, and its tables against the rows kept."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.slow  # `make test-all` runs it

pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks import exactness, finetuning  # noqa: E402
from benchmarks.finetuning_models import FINETUNING  # noqa: E402
from benchmarks.tables import read_rows  # noqa: E402
from examples.papers import vit  # noqa: E402


def test_vit_keeps_its_positions_at_its_own_size() -> None:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=56, patch_size=14)
    torch.manual_seed(0)
    body = Dinov2Model(config).eval()
    x = torch.rand(2, 3, 28, 28)
    wanted = body(x).last_hidden_state  # made for the size in every forward
    made = vit.ViT(vit.resized(body, 28))
    torch.testing.assert_close(made.body(x).last_hidden_state, wanted)
    assert made(x).shape == (2, 24) and made.body.embeddings.position_embeddings.shape[1] == 5
    assert vit.renamed("encoder.layer.0.attention.output.dense.bias") == "encoder.layer.0.attention.o_proj.bias"


@pytest.mark.parametrize("name", ["sst2-lora", "sst2-full"])
def test_steps_are_measured_of_exact_contenders(name: str) -> None:
    work = FINETUNING[name]._replace(batch_size=2)
    assert exactness.error_of("fastdp", work) < 1e-4


def test_the_document_has_the_tables_of_the_rows() -> None:
    text = finetuning.DOC.read_text()
    assert finetuning.filled(text) == text, "python -m benchmarks.finetuning --report"
    rows = read_rows(finetuning.RUNS)
    assert rows and all(row["commit"] != "-" and row["date"] for row in rows)
    for row in rows:
        if row["engine"] != "none":
            assert float(row["epsilon"]) <= float(row["epsilon_target"]), row
