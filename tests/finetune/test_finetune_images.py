"""Images of a folder as records: classes by folder, damaged files by name, a run from beginning to end."""

from __future__ import annotations

import pytest
import torch

import fastdp
from fastdp.finetune import command as command_module
from fastdp.finetune import images
from fastdp.finetune.plan import FinetuneError

from .finetune_models import QUICK, card_of, command, options_of, refused, seer, transformers

pytestmark = pytest.mark.slow  # `make test-all` runs it

Image = pytest.importorskip("PIL.Image")


def pictures(folder, count=24, classes=("cat", "dog")):
    """Noise of other sizes, dark or bright by the class."""
    drawn = torch.Generator().manual_seed(0)
    for i in range(count):
        name = classes[i % len(classes)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        values = torch.randint(0, 100, (12 + i % 3, 15), generator=drawn) + 150 * (i % len(classes))
        Image.fromarray(values.to(torch.uint8).numpy()).save(folder / name / f"{i:03d}.png")
    return folder


def load(folder, *words):
    return images.load_images(options_of("m", folder, "--task", "images", "--epsilon", 1, *words))


@pytest.fixture
def data(tmp_path):
    return pictures(tmp_path / "pets")


@pytest.mark.parametrize("more", [(), ("--lora", 2)])
def test_a_run(tmp_path, data, capsys, more):
    model, out = seer(tmp_path / "vit"), tmp_path / "out"
    words = ("--task", "images", "--out", out, "--eval-fraction", 0.3, *more, *QUICK)
    assert command(model, data, *words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    for part in ("ViTForImageClassification", "verify on 4 records: exact", "2 labels", "'cat', 'dog'", "accuracy",
                 "chosen by a hash of each one's file"):  # fmt: skip
        assert part in said, part
    load = transformers.AutoModelForImageClassification.from_pretrained
    if more:
        peft = pytest.importorskip("peft")
        found = peft.PeftModel.from_pretrained(load(model), out / "model")
        assert any("modules_to_save" in name for name, _ in found.named_parameters())  # the head is trained, and kept
        return
    assert load(out / "model").config.id2label == {0: "cat", 1: "dog"} and card_of(out)["task"] == "images"
    processor = transformers.AutoImageProcessor.from_pretrained(out / "model")
    assert processor(images=[Image.new("RGB", (9, 9))], return_tensors="pt")["pixel_values"].shape == (1, 3, 16, 16)


def test_what_is_loaded_of_a_network_whose_batch_norm_was_replaced(tmp_path, data, capsys, monkeypatch):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=2)
    model, kept, made = tmp_path / "resnet", [], command_module.train
    transformers.ResNetForImageClassification(config).save_pretrained(model)
    (model / "preprocessor_config.json").write_text((seer(tmp_path / "vit") / "preprocessor_config.json").read_text())
    monkeypatch.setattr(command_module, "train", lambda ready: kept.append(ready.job.model) or made(ready))
    out = tmp_path / "out"
    assert command(model, data, "--task", "images", "--out", out, *QUICK) == 0
    assert capsys.readouterr().out.count("then fastdp.make_compatible(model)") == 2
    assert "fastdp.make_compatible(model)" in card_of(out)["released"]
    found = transformers.AutoModelForImageClassification.from_pretrained(out / "model")
    fastdp.make_compatible(found)
    x = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(found.eval()(x).logits, kept[0].eval()(x).logits)


def test_a_folder_of_timm(tmp_path, data, capsys):
    timm = pytest.importorskip("timm")
    model = tmp_path / "timm"
    model.mkdir()
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=10), str(model), safe_serialization=True)
    assert command(model, data, "--task", "images", "--out", tmp_path / "out", *QUICK) == 0
    assert "TimmWrapperForImageClassification" in capsys.readouterr().out


def test_who_is_held_out_depends_on_the_image_alone(data):
    found = load(data, "--eval-fraction", 0.3)
    held, train = ({each["text"] for each in side} for side in (found.held_out, found.train))
    assert 0 < len(held) < 24 and not held & train
    (data / "cat" / "000.png").rename(data / "cat" / "zzz.png")
    (data / "dog" / "001.png").unlink()
    again = load(data, "--eval-fraction", 0.3)
    left = {each["text"] for each in [*again.train, *again.held_out]}
    assert len(left) == 23 and {each["text"] for each in again.held_out} == held & left


def test_what_is_no_image(tmp_path, data):
    (data / "notes.txt").write_text("")
    (data / "cat" / ".hidden.png").write_text("")
    assert len(load(data, "--eval-fraction", 0).train) == 24
    (data / "cat" / "bad.png").write_bytes(b"damaged")
    whole = (data / "dog" / "001.png").read_bytes()
    (data / "dog" / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.new("I;16", (9, 9)).save(data / "dog" / "deep.png")
    with pytest.raises(FinetuneError) as found:
        load(data)
    for words in ("3 of 27 rows", "cat/bad.png: ", "dog/cut.png: ", "dog/deep.png: its pixels have more than 8 bits",
                  "--skip-bad-rows 3"):  # fmt: skip
        assert words in str(found.value)
    assert len(load(data, "--skip-bad-rows", 3, "--eval-fraction", 0).train) == 24


def test_folders_that_cannot_be_used(tmp_path, data, capsys):
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    pictures(tmp_path / "set" / "train"), pictures(tmp_path / "set" / "val")
    one = pictures(tmp_path / "one", 4, ("cat",))
    for folder, words, match in (
        (tmp_path / "empty", (), "hold no images"), (one, (), "'cat' only"),
        (tmp_path / "set", (), r"divided already(.|\n)*Give \S*/set/train --eval \S*/set/val"),
        (data, ("--labels", "cat,bird"), "the label 'dog' is none of 'cat', 'bird'"),
        (data, ("--group-by", "x"), "--group-by does not go with --task images"),
        (data / "cat" / "000.png", (), "is a file"),
    ):  # fmt: skip
        with pytest.raises(FinetuneError, match=match):
            load(folder, *words)
    found = load(tmp_path / "set" / "train", "--eval", tmp_path / "set" / "val")
    assert len(found.train) == len(found.held_out) == 24
    model = seer(tmp_path / "vit")
    (model / "preprocessor_config.json").unlink()
    said = refused(capsys, model, data, "--task", "images", "--out", tmp_path / "o", *QUICK)
    assert "preprocessor_config.json" in said
