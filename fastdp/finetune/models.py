"""A model and its tokenizer, from a folder or a hub; what of it is trained."""

from __future__ import annotations

import fnmatch
import logging
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..utils.extras import install_command
from ..utils.formatting import count, listed
from ..verification.compatible import make_compatible
from .plan import FinetuneError
from .tasks import TASKS, generates

RELOAD = "To load the result: from_pretrained(), then fastdp.make_compatible(model); its config.json names other layers"
_MEANT = {
    "AutoModelForCausalLM": "a language model, such as GPT-2 or Llama",
    "AutoModelForSeq2SeqLM": "an encoder and decoder, such as T5 or BART",
    "AutoModelForImageClassification": "a model of images, such as ViT or ResNet",
    "AutoModelForTokenClassification": "a body that can tag words, such as BERT",
    "AutoModelForSequenceClassification": "a body that can classify texts, such as BERT",
}


def transformers() -> Any:
    """The package, or a FinetuneError that names the extra."""
    try:
        import transformers as found
    except ImportError:
        raise FinetuneError(f"this needs transformers: {install_command('finetune')}") from None
    return found


def silence() -> None:
    """Turn the libraries' own bars, advice and statistics of use off: what matters of it is said in our words."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    transformers().logging.set_verbosity_error()
    transformers().logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _source(name: str) -> dict[str, str]:
    """Arguments of from_pretrained: a folder with a GGUF file in place of a config.json is read from that file."""
    place = Path(name).expanduser()
    if not place.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise FinetuneError(f"there is no folder {name}")
        return {"pretrained_model_name_or_path": name}
    packed = [place] if place.suffix == ".gguf" else sorted(place.glob("*.gguf"))
    if (place / "config.json").exists() or len(packed) != 1:
        return {"pretrained_model_name_or_path": str(place)}
    return {"pretrained_model_name_or_path": str(packed[0].parent), "gguf_file": packed[0].name}


def read(what: str, name: str, kind: Any, **more: Any) -> Any:
    """kind.from_pretrained, its errors in few words."""
    from safetensors import SafetensorError

    source = _source(name)
    try:
        return kind.from_pretrained(**source, **more)
    except (ImportError, OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, SafetensorError) as problem:
        if "Unrecognized configuration class" in str(problem) and kind.__name__ in _MEANT:
            raise FinetuneError(
                f"{name} is a {load_config(name).model_type} model, and this task needs {_MEANT[kind.__name__]}"
            ) from None
        remedy = "" if Path(name).expanduser().exists() else (
            "\nThere is no such folder, and the hub does not give it: check the name, log in if the model is gated, or "
            "give a folder that holds it"
        )  # fmt: skip
        raise FinetuneError(f"the {what} of {name} cannot be read: {first_line(problem)}{remedy}") from None


def first_line(problem: BaseException) -> str:
    """The first words of an error, without the advice behind."""
    text = str(problem).strip() or type(problem).__name__
    return text.splitlines()[0][:240]


def load_config(name: str) -> Any:
    """The model's configuration."""
    return read("configuration", name, transformers().AutoConfig)


def known_labels(config: Any) -> Mapping[str, int] | None:
    """{label: number} that the model was trained with, if it is a classifier."""
    numbers = getattr(config, "label2id", None) or {}
    classifies = any(name.endswith("Classification") for name in getattr(config, "architectures", None) or ())
    return {str(name): int(number) for name, number in numbers.items()} if classifies else None


def load_tokenizer(name: str) -> Any:
    """The tokenizer beside the model."""
    found = read("tokenizer", name, transformers().AutoTokenizer)
    if not len(found):
        raise FinetuneError(f"{name} has no tokenizer: its vocabulary is empty")
    return found


def load_model(name: str, task: str, names: Sequence[str] | None, dtype: str) -> tuple[nn.Module, set[str], list[str]]:
    """(model, names of parameters that are new, what to say); raises FinetuneError.

    What mixes samples is replaced (BatchNorm), or the model refused.
    """
    kind, more = getattr(transformers(), TASKS[task].auto), dict[str, Any]()
    if TASKS[task].names:
        labels = dict(enumerate(names or ()))
        more = {"num_labels": len(labels), "id2label": labels, "label2id": {v: k for k, v in labels.items()}}
    if task == "regression":
        more["num_labels"] = 1
    if TASKS[task].problem:
        more["problem_type"] = TASKS[task].problem
    config = load_config(name) if task == "images" else None
    if (getattr(config, "model_args", None) or {}).pop("num_classes", None):  # a folder that timm wrote: given twice
        for field, value in more.items():
            setattr(config, field, value)
        more = {"config": config}
    more |= {"ignore_mismatched_sizes": True} if more else {}  # a head for other labels is made anew
    model, info = read("model", name, kind, dtype=getattr(torch, dtype), output_loading_info=True, **more)
    new = set(info.get("missing_keys", ())) | {str(key[0]) for key in info.get("mismatched_keys", ())}
    new &= {key for key, _ in model.named_parameters()}
    said = [f"New, not pre-trained: {listed(sorted(new), 4)}"] if new else []
    if generates(task) and new:
        what = "writes no text for a text" if task == "seq2seq" else "is no language model"
        raise FinetuneError(f"{name} {what}: it has no weights for {listed(sorted(new), 4)}")
    report = make_compatible(model)
    if report.left:
        raise FinetuneError(f"the model mixes samples, and this could not be replaced:\n{report}")
    if report.changed:
        said.append(f"{report}\n  (their statistics are gone: such a model needs more training)\n{RELOAD}")
    return model, new, said


# ---------------------------------------------------------------------- what is trained


def choose_trained(model: nn.Module, new: set[str], options: Namespace) -> tuple[nn.Module, list[str]]:
    """Freeze and adapt as the options say: (the model, with adapters if asked for; what to say)."""
    said = []
    if options.lora and options.train_only:
        raise FinetuneError("--train-only and --lora exclude each other: --lora trains the adapters and the head")
    if not options.lora and (options.lora_alpha or options.lora_target):
        raise FinetuneError("--lora-alpha and --lora-target go with --lora RANK")
    if options.lora:
        model, text = _with_adapters(model, new, options)
        said.append(text)
    wanted = _matching(model, options.train_only or (), "--train-only", new, options.task)
    frozen = _matching(model, options.freeze or (), "--freeze", new, options.task)
    for name, parameter in model.named_parameters():
        if name in frozen or (options.train_only and name not in wanted):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise FinetuneError("nothing is left to train: --train-only and --freeze leave no parameter")
    random = sorted(name for name, p in model.named_parameters() if name in new and not p.requires_grad)
    if random:
        said.append(
            f"Note: {listed(random, 3)} are new and will stay at random values, as --freeze or --train-only say"
        )
    return model, said


def new_parameters(model: nn.Module, new: set[str]) -> set[str]:
    """The names that new parameters have in the model, which may be wrapped by peft (adapters are not among them)."""
    plain = {name: name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")
             for name, _ in model.named_parameters()}  # fmt: skip
    return {name for name, known in plain.items() if known in new}


def _with_adapters(model: nn.Module, new: set[str], options: Namespace) -> tuple[nn.Module, str]:
    try:
        import peft
    except ImportError:
        raise FinetuneError(f"--lora needs peft: {install_command('finetune')}") from None
    alpha, kind, target = options.lora_alpha or 2 * options.lora, TASKS[options.task].peft, options.lora_target
    # of peft's own kinds of models, peft trains the head; of others it must be told
    head = None if kind else sorted({name.rpartition(".")[0] for name in _head(model, new, options.task)})

    def adapted(target: Any) -> Any:
        how = dict(task_type=kind, r=options.lora, lora_alpha=alpha, target_modules=target, modules_to_save=head)
        return peft.get_peft_model(model, peft.LoraConfig(**how))

    try:
        made = adapted("all-linear" if target == ["all-linear"] else target)
    except ValueError as problem:
        if target is not None:
            raise FinetuneError(f"--lora-target {','.join(target)}: {first_line(problem)}") from None
        made = adapted("all-linear")  # peft has no choice of its own for this kind of model
    chosen = next(iter(made.peft_config.values())).target_modules
    where = chosen if isinstance(chosen, str) else ", ".join(sorted(chosen))
    return made, f"LoRA: rank {options.lora}, alpha {alpha:g}, on {where}"


def _matching(model: nn.Module, patterns: Iterable[str], flag: str, new: set[str], task: str) -> set[str]:
    """Names of the parameters that a pattern matches, each pattern at least one."""
    every = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for pattern in patterns:
        some = _head(model, new, task) if pattern == "head" else set(fnmatch.filter(every, pattern))
        if not some:
            raise FinetuneError(
                f"{flag}: no parameter is named like {pattern!r}; there are {count(len(every))}, from {every[0]} to "
                f"{every[-1]} ('*' stands for anything: '*{pattern}*')"
            )
        found |= some
    return found


def _head(model: nn.Module, new: set[str], task: str) -> set[str]:
    """The parameters outside the pre-trained body, and those that are new."""
    owner: Any = model
    if generates(task):
        head = owner.get_output_embeddings()
        inside = {id(p) for p in head.parameters()} if head is not None else set()
        return {name for name, p in model.named_parameters() if id(p) in inside}
    body = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
    inside = {id(p) for p in body.parameters()} if isinstance(body, nn.Module) else set()
    return {name for name, p in model.named_parameters() if name in new or (inside and id(p) not in inside)}
