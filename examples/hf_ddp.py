"""A small vision transformer on scikit-learn's digits by `fastdp.hf.DPTrainer`, on any number of processes.

pip install '.[hf]' scikit-learn
torchrun --nproc-per-node 2 examples/hf_ddp.py [--quick] [--fsdp]

With --fsdp, GPUs hold a part of the model each (FSDP2), and whole copies of it without.
`sample_rate` says how large a batch is in expectation: by it, twice as many processes hold half of each batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import transformers
from digits import digits, parser

from fastdp.hf import DPTrainer, PrivacyArguments

DELTA, BATCH, AT_ONCE = 1e-4, 256, 64  # the batch of all processes together; what one of them holds at once


def records(images: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[dict[str, Any]]:
    return [{"pixel_values": image, "labels": int(label)} for image, label in images]


def network() -> transformers.PreTrainedModel:
    transformers.set_seed(0)
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=48, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=96, hidden_dropout_prob=0.0, num_labels=10, initializer_range=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--fsdp", action="store_true", help="lay the model in parts on all processes")
    made.add_argument("--output")
    options = made.parse_args()
    images, x, y = digits()
    train, test = records(images), records(zip(x, y, strict=True))
    arguments = transformers.TrainingArguments(
        output_dir=options.output or tempfile.mkdtemp(), num_train_epochs=4 if options.quick else 30,
        per_device_train_batch_size=AT_ONCE, learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=10,
        eval_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        fsdp=options.fsdp or None, fsdp_config={"transformer_layer_cls_to_wrap": ["ViTLayer"]},
    )  # fmt: skip
    privacy = PrivacyArguments(target_epsilon=options.epsilon, delta=DELTA, sample_rate=BATCH / len(train))
    trainer = DPTrainer(
        model=network(), args=arguments, train_dataset=train, eval_dataset=test, compute_metrics=accuracy,
        privacy=privacy,
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()  # on all processes, each on its part
    trainer.save_model()  # by the first process
    if trainer.is_world_process_zero():
        print(f"accuracy {found['eval_accuracy']:.3f}, epsilon {trainer.epsilon():.2f} at delta {trainer.delta():g}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
