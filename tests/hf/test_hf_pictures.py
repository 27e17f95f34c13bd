"""A vision-language model: a record has a text and an image, and its gradient is that of both alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ..hf_models import error, transformers, weights
from ..hf_texts import WORDS, draw, private, truth
from ..hf_trl import config, datasets, quiet, trl

Image = pytest.importorskip("PIL.Image")

from fastdp.hf import DPSFTTrainer  # noqa: E402

assert quiet
pytestmark = pytest.mark.usefixtures("quiet")


def processor():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*WORDS, "<image>"])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    sides = {"height": 16, "width": 16}
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(size=sides, crop_size=sides), tokenizer=tokenizer, patch_size=8,
        vision_feature_select_strategy="default", image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip


def llava():
    torch.manual_seed(0)
    small = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    text = transformers.LlamaConfig(vocab_size=len(WORDS) + 1, num_key_value_heads=1, pad_token_id=27, eos_token_id=26,
                                    bos_token_id=26, **small)  # fmt: skip
    sight = transformers.CLIPVisionConfig(image_size=16, patch_size=8, **small)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=sight, text_config=text, image_token_id=len(WORDS), image_seq_length=4,
                                 vision_feature_layer=-1, vision_feature_select_strategy="default")
    )  # fmt: skip


def test_a_step_by_hand(tmp_path):
    model, drawn = llava().double(), np.random.default_rng(0)
    rows = [
        {"prompt": f"<image> {one}", "completion": f" {other}",
         "images": [Image.fromarray(drawn.integers(0, 255, (16, 16, 3), dtype=np.uint8))]}
        for one, other in zip(draw(5, 1, 5), draw(5, 1, 6, 1), strict=True)
    ]  # fmt: skip
    data = datasets.Dataset.from_list(rows).cast_column("images", datasets.Sequence(datasets.Image()))
    trainer = DPSFTTrainer(
        model=model, args=config("SFT", tmp_path, max_length=None, per_device_train_batch_size=3), train_dataset=data,
        processing_class=processor(), privacy=private(),
    )  # fmt: skip

    def alone(number):
        batch = trainer.data_collator([dict(trainer.train_dataset[number])])
        return trl.SFTTrainer.compute_loss(trainer, model, dict(batch))

    want, norm = truth(model, [lambda n=n: alone(n) for n in range(len(data))], 0.1)
    trainer._metrics["train"].clear()
    before = weights(model)
    trainer.privacy.per_sample_max_grad_norm = norm
    trainer.train()
    seen = [n for n in want if "vision_tower" in n and not torch.equal(want[n], before[n])]
    assert seen and error(weights(model), want, before) < 1e-5
