"""The table of TrainingArguments: complete, enforced, and true of those it says are supported."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..hf_models import DPTrainer, PrivacyArguments, bert, gpt2, private, texts, trainer_of, transformers, weights

from fastdp.hf import argument_table, arguments  # isort: skip

pytestmark = pytest.mark.slow  # `make test-all` runs it

REFUSED = [name for name, field in argument_table.FIELDS.items() if field.status == "refused"]


def test_the_table_is_complete():
    """A new field of transformers must be thought about before it is let through."""
    installed = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert set(argument_table.FIELDS) == installed
    assert {field.status for field in argument_table.FIELDS.values()} == {"supported", "refused", "no effect"}
    assert all(field.why for field in argument_table.FIELDS.values() if field.status != "supported")


@pytest.mark.parametrize("kind", argument_table.TABLES)
def test_the_tables_in_the_documentation(kind):
    """All fields that are refused, also those of subclasses."""
    page = Path(__file__).parent.parent.parent / "docs" / "huggingface.md"
    shown = {n: field for n, field in argument_table.TABLES[kind].items() if field.status == "refused"}
    if kind == "DPOConfig":  # the page refers to SFTConfig's for what both refuse
        shown = {n: field for n, field in shown.items() if field != argument_table.SFT.get(n)}
    assert arguments.table(shown) in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused(name, tmp_path):
    """When the trainer is made, and again when it trains, as arguments can change; the weights stay."""
    arguments_of = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    arguments.check(arguments_of)  # defaults pass
    field = argument_table.FIELDS[name]
    object.__setattr__(arguments_of, name, field.example)
    with pytest.raises(arguments.ArgumentError, match=f"{name}=.*refused"):
        DPTrainer(model=bert(), args=arguments_of, train_dataset=texts(), privacy=private())
    trainer = trainer_of(tmp_path, bert(num_labels=3), texts())
    before = weights(trainer.model)
    object.__setattr__(trainer.args, name, field.example)
    with pytest.raises(arguments.ArgumentError, match=f"{name}=.*refused"):
        trainer.train()
    assert all(torch.equal(p, before[n]) for n, p in weights(trainer.model).items())


@dataclasses.dataclass
class More(transformers.TrainingArguments):
    """A subclass that fastdp does not know: a field with a default of its own, one that is made afterwards."""

    mixing: float = 0.0
    padding: str | None = "auto"
    logging_steps: float = 10

    def __post_init__(self):
        super().__post_init__()
        self.padding = None if self.padding == "auto" else self.padding


def test_fields_of_subclasses_are_not_let_through(tmp_path):
    arguments.check(More(str(tmp_path), use_cpu=True))
    for wrong in ({"mixing": 0.5}, {"padding": "longest"}):
        with pytest.raises(arguments.ArgumentError, match=f"More.{next(iter(wrong))}=.*does not know this field"):
            arguments.check(More(str(tmp_path), use_cpu=True, **wrong))


def test_fields_of_seq2seq(tmp_path):
    kind = transformers.Seq2SeqTrainingArguments
    assert {field.name for field in dataclasses.fields(kind)} == set(argument_table.fields_of(kind))
    arguments.check(kind(str(tmp_path), use_cpu=True, predict_with_generate=True, generation_num_beams=2))
    with pytest.raises(arguments.ArgumentError, match="sortish_sampler=True is refused: Poisson"):
        arguments.check(kind(str(tmp_path), use_cpu=True, sortish_sampler=True))


def test_several_devices_of_one_process(tmp_path, monkeypatch):
    made = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    monkeypatch.setattr(type(made), "n_gpu", 2)
    with pytest.raises(arguments.ArgumentError, match="2 GPUs"):
        arguments.check(made)


SUPPORTED = {
    "optim fused": {"optim": "adamw_torch_fused"},
    "optim adagrad": {"optim": "adagrad"},
    "optim rmsprop": {"optim": "rmsprop"},
    "optim adafactor": {"optim": "adafactor"},
    "adam": {"optim": "adamw_torch", "adam_beta1": 0.8, "weight_decay": 0.1, "optim_args": "amsgrad=True"},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 1},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing, reentrant": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "compiled and bf16": {"torch_compile": True, "torch_compile_backend": "eager", "bf16": True},
    "workers": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2, "dataloader_persistent_workers": True},
    "cache": {"use_cache": True},
    "columns": {"remove_unused_columns": True, "label_names": ["labels"]},
    "no clipping word": {"max_grad_norm": 0.0},
    "tokens": {"include_num_input_tokens_seen": "non_padding", "logging_strategy": "steps", "logging_steps": 1},
    "jit checkpoint": {"enable_jit_checkpoint": True},
    "determinism": {"full_determinism": True},
    "empty cache": {"torch_empty_cache_steps": 1},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1,
                "lr_scheduler_kwargs": {"patience": 0}, "metric_for_best_model": "loss"},
    "best model": {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps",
                   "save_steps": 1, "metric_for_best_model": "loss", "save_total_limit": 1},
    "evaluation": {"eval_on_start": True, "eval_strategy": "epoch", "batch_eval_metrics": False,
                   "eval_accumulation_steps": 1, "include_for_metrics": ["loss", "inputs"]},
}  # fmt: skip


@pytest.mark.parametrize("case", SUPPORTED)
def test_what_is_supported_works(case, tmp_path):
    """Two noised steps each; and the noiseless first step is the plain one's, but for rounding."""
    made = bert(num_labels=3) if "cache" not in case else gpt2()
    data = texts(12, "class" if "cache" not in case else "next")
    trainer = trainer_of(
        tmp_path, made, data, private(noise_multiplier=1.0), gradient_accumulation_steps=2,
        more={"eval_dataset": data}, **SUPPORTED[case],
    )  # fmt: skip
    before = weights(made)
    trainer.train()
    torch.use_deterministic_algorithms(False)
    assert trainer.history == [(1.0, pytest.approx(2 / 3), 2)] and trainer.state.global_step == 2
    assert all(not torch.equal(p, before[name]) for name, p in made.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("case", ["bf16", "checkpointing", "checkpointing, reentrant", "compiled", "workers"])
def test_what_is_supported_gives_the_same_step(case, tmp_path):
    found = []
    for extra in ({}, SUPPORTED[case]):
        model = gpt2()
        trainer = trainer_of(
            tmp_path, model, texts(12, "next"), private(sample_rate=1.0, per_sample_max_grad_norm=0.5), max_steps=1,
            **extra,
        )  # fmt: skip
        before = weights(model)
        trainer.train()
        found.append({name: (p - before[name]).double() for name, p in weights(model).items()})
    wrong = sum(float((found[0][n] - found[1][n]).square().sum()) for n in found[0]) ** 0.5
    size = sum(float(p.square().sum()) for p in found[0].values()) ** 0.5
    assert size > 0.01 and wrong <= (2e-2 if case == "bf16" else 1e-5) * size


def test_on_the_command_line(tmp_path):
    """Both dataclasses in one parser: no name of one is the other's."""
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, PrivacyArguments))
    training, privacy = parser.parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--target_epsilon", "3", "--delta", "1e-5", "--style", "layerwise",
         "--per_sample_max_grad_norm", "0.1", "--no_verify", "--group_by", "user", "--use_cpu"]
    )  # fmt: skip
    assert training.max_grad_norm == 1.0 and privacy.per_sample_max_grad_norm == 0.1
    assert privacy.target_epsilon == 3.0 and privacy.delta == 1e-5 and privacy.noise_seed is None
    assert not privacy.verify and privacy.group_by == "user" and privacy.style == "layerwise"


@pytest.mark.parametrize(
    "wrong",
    [{}, {"target_epsilon": 0}, {"noise_multiplier": -1}, {"target_epsilon": 1, "noise_multiplier": 0},
     {"noise_multiplier": 1, "delta": 1.5}, {"noise_multiplier": 1, "accountant": "magic"},
     {"noise_multiplier": 1, "max_records_per_group": 3},
     {"noise_multiplier": 1, "style": "layerwise", "log_clipped_share": True}],
)  # fmt: skip
def test_options_without_meaning(wrong):
    with pytest.raises((ValueError, RuntimeError)):
        PrivacyArguments(**wrong)


@pytest.mark.parametrize(
    ("name", "said"),
    [("epsilon", "'epsilon': target_epsilon= is the budget"), ("target_delta", "it is called delta"),
     ("max_grad_norm", "did you mean 'per_sample_max_grad_norm'"), ("num_train_epochs", "one of TrainingArguments")],
)  # fmt: skip
def test_misnamed_options_are_refused_with_what_was_meant(name, said):
    with pytest.raises(TypeError, match=f"PrivacyArguments got an argument .*{said}"):
        PrivacyArguments(**{name: 8})


def test_fastdp_itself_stays_light():
    code = "import sys, fastdp; print([m for m in ('transformers', 'accelerate', 'peft') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
