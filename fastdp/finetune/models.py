"""A model and its tokenizer, from a folder or a hub; what of it is trained."""

from __future__ import annotations

import fnmatch
import logging
import os
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..utils.formatting import count, listed
from ..verification.compatible import make_compatible
from .plan import FinetuneError
from .tasks import TASKS, generates


def transformers() -> Any:
    """The package, or a FinetuneError that names the extra."""
    try:
        import transformers as found
    except ImportError:
        raise FinetuneError("this needs transformers: pip install 'fastdp[finetune]'") from None
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' own bars and advice: what matters of it is said in our words."""
    library = transformers()
    level = library.logging.get_verbosity()
    bars = library.logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.logging.set_verbosity(level)
        if bars:
            library.logging.enable_progress_bar()
        hub.setLevel(hub_level)


def _sources(name: str) -> dict[str, Any]:
    """Arguments of from_pretrained: a folder with a GGUF file in place of a config.json is read from that file."""
    folder = Path(name).expanduser()
    if not folder.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise FinetuneError(f"there is no folder {name}")
        return {"pretrained_model_name_or_path": name}
    if folder.is_file() and folder.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(folder.parent), "gguf_file": folder.name}
    if folder.is_file():
        raise FinetuneError(
            f"{name} is a file: give the folder that holds config.json and the weights, or a .gguf file"
        )
    if (folder / "config.json").exists():
        return {"pretrained_model_name_or_path": str(folder)}
    packed = sorted(folder.glob("*.gguf"))
    if len(packed) == 1:
        return {"pretrained_model_name_or_path": str(folder), "gguf_file": packed[0].name}
    if packed:
        raise FinetuneError(f"{name} holds {len(packed)} GGUF files: give one of them, such as {packed[0]}")
    there = sorted(each.name + "/" * each.is_dir() for each in folder.iterdir())
    raise FinetuneError(f"{name} holds no model: there is no config.json in it, but {listed(there) or 'nothing'}")


_MEANT = {
    "AutoModelForCausalLM": "a language model, such as GPT-2 or Llama",
    "AutoModelForSeq2SeqLM": "an encoder and decoder, such as T5 or BART",
    "AutoModelForImageClassification": "a model of images, such as ViT or ResNet",
    "AutoModelForTokenClassification": "a body that can tag words, such as BERT",
    "AutoModelForSequenceClassification": "a body that can classify texts, such as BERT",
}


def read(what: str, name: str, kind: Any, **more: Any) -> Any:
    """kind.from_pretrained, its errors in few words."""
    from safetensors import SafetensorError

    source = _sources(name)
    try:
        with quiet():
            return kind.from_pretrained(**source, **more)
    except ImportError as problem:
        raise FinetuneError(
            f"the {what} of {name} needs a package that is not installed: {first_line(problem)}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, SafetensorError) as problem:
        if "Unrecognized configuration class" in str(problem) and kind.__name__ in _MEANT:
            raise FinetuneError(
                f"{name} is a {load_config(name).model_type} model, and this task needs {_MEANT[kind.__name__]}"
            ) from None
        if Path(source["pretrained_model_name_or_path"]).exists():
            raise FinetuneError(f"the {what} in {name} cannot be read: {first_line(problem)}") from None
        offline = " (HF_HUB_OFFLINE is set: nothing is fetched)" if os.environ.get("HF_HUB_OFFLINE", "0") != "0" else ""
        raise FinetuneError(
            f"the {what} of {name!r} cannot be had: there is no such folder, and the hub does not give it{offline}.\n"
            f"  {first_line(problem)}\n"
            "Check the name, log in if the model is gated, or give a folder that holds it."
        ) from None


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
    kinds = ("SequenceClassification", "TokenClassification", "ImageClassification")
    classifies = any(kind in name for name in getattr(config, "architectures", None) or () for kind in kinds)
    return {str(name): int(number) for name, number in numbers.items()} if classifies else None


def load_tokenizer(name: str) -> Any:
    """The tokenizer beside the model."""
    found = read("tokenizer", name, transformers().AutoTokenizer)
    if not len(found):
        raise FinetuneError(f"{name} has no tokenizer: its vocabulary is empty")
    return found


_PROBLEMS = {"classify": "single_label_classification", "multi-label": "multi_label_classification",
             "regression": "regression"}  # fmt: skip


RELOAD = "To load the result: from_pretrained(), then fastdp.make_compatible(model); its config.json names other layers"


def load_model(name: str, task: str, names: Sequence[str] | None, dtype: str) -> tuple[nn.Module, set[str], list[str]]:
    """(model, names of parameters that are new, what to say); raises FinetuneError.

    What mixes samples is replaced (BatchNorm), or the model refused.
    """
    kind = getattr(transformers(), TASKS[task].auto)
    more: dict[str, Any] = {}
    if TASKS[task].names:
        labels = {number: label for number, label in enumerate(names or ())}
        more = {"num_labels": len(labels), "id2label": labels, "label2id": {v: k for k, v in labels.items()}}
    if task == "regression":
        more["num_labels"] = 1
    if task in _PROBLEMS:
        more["problem_type"] = _PROBLEMS[task]
    if more:
        more["ignore_mismatched_sizes"] = True  # a head for other labels is made anew
    if task == "images":
        config = load_config(name)
        arguments = getattr(config, "model_args", None) or {}
        if "num_classes" in arguments:  # of a folder that timm wrote: it would be given twice
            arguments.pop("num_classes")
            for field, value in more.items():
                if field != "ignore_mismatched_sizes":
                    setattr(config, field, value)
            more = {"config": config, "ignore_mismatched_sizes": True}
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
    if options.lora:
        if options.train_only:
            raise FinetuneError("--train-only and --lora exclude each other: --lora trains the adapters and the head")
        model, text = _with_adapters(model, new, options)
        said.append(text)
    elif options.lora_alpha or options.lora_target:
        raise FinetuneError("--lora-alpha and --lora-target go with --lora RANK")
    if options.train_only:
        wanted = _matching(model, options.train_only, "--train-only", new, options.task)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)
    if options.freeze:
        wanted = _matching(model, options.freeze, "--freeze", new, options.task)
        for name, parameter in model.named_parameters():
            if name in wanted:
                parameter.requires_grad_(False)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not trained:
        raise FinetuneError("nothing is left to train: --train-only and --freeze leave no parameter")
    frozen = sorted(name for name, p in model.named_parameters() if name in new and not p.requires_grad)
    if frozen:
        said.append(
            f"Note: {listed(frozen, 3)} are new and will stay at random values, as --freeze or --train-only say"
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
        raise FinetuneError("--lora needs peft: pip install 'fastdp[finetune]'") from None
    alpha = options.lora_alpha or 2 * options.lora

    # of peft's own kinds of models, peft trains the head; of others it must be told
    head = None if TASKS[options.task].peft else sorted(
        {name.rpartition(".")[0] for name in _head(model, new, options.task)}
    )  # fmt: skip

    def adapted(target: Any) -> Any:
        if target == ["all-linear"]:
            target = "all-linear"
        chosen = peft.LoraConfig(
            task_type=TASKS[options.task].peft,
            r=options.lora,
            lora_alpha=alpha,
            target_modules=target,
            modules_to_save=head,
        )
        with quiet():
            return peft.get_peft_model(model, chosen)

    target = options.lora_target
    try:
        made = adapted(target)
    except ValueError as problem:
        if target is not None:
            raise FinetuneError(f"--lora-target {','.join(target)}: {first_line(problem)}") from None
        target = ["all-linear"]  # peft has no choice of its own for this kind of model
        made = adapted(target)
    chosen = next(iter(made.peft_config.values())).target_modules
    where = chosen if isinstance(chosen, str) else ", ".join(sorted(chosen))
    return made, f"LoRA: rank {options.lora}, alpha {alpha:g}, on {where}"


def _matching(model: nn.Module, patterns: Iterable[str], flag: str, new: set[str], task: str) -> set[str]:
    """Names of the parameters that a pattern matches, each pattern at least one."""
    every = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for pattern in patterns:
        some = _head(model, new, task) if pattern == "head" else {n for n in every if fnmatch.fnmatchcase(n, pattern)}
        if not some:
            raise FinetuneError(
                f"{flag}: no parameter is named like {pattern!r}; there are {count(len(every))}, from {every[0]} to "
                f"{every[-1]} ('*' stands for anything: '*{pattern}*')"
            )
        found |= some
    return found


def _head(model: nn.Module, new: set[str], task: str) -> set[str]:
    """The parameters outside the pre-trained body, and those that are new."""
    if generates(task):
        head = getattr(model, "get_output_embeddings", lambda: None)()
        inside = {id(p) for p in head.parameters()} if head is not None else set()
        return {name for name, p in model.named_parameters() if id(p) in inside}
    body = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
    inside = {id(p) for p in body.parameters()} if isinstance(body, nn.Module) else set()
    return {name for name, p in model.named_parameters() if name in new or (inside and id(p) not in inside)}
