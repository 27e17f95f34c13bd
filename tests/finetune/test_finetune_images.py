"""Images of a folder as records: classes by folder, damaged files by name, a run from beginning to end."""

from __future__ import annotations

import json

import pytest
import torch

import fastdp
from fastdp.finetune import command as command_module
from fastdp.finetune import images
from fastdp.finetune.plan import FinetuneError

from .finetune_models import card_of, command, options_of, seer, transformers
from .test_finetune_command import QUICK, refused

pytestmark = pytest.mark.slow  # `make test-all` runs it

Image = pytest.importorskip("PIL.Image")
made = command_module.train


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


@pytest.mark.parametrize("more", [(), ("--lora", 2), ("--train-only", "head")])
def test_a_run(tmp_path, capsys, more):
    model, data, out = seer(tmp_path / "vit"), pictures(tmp_path / "pets"), tmp_path / "out"
    words = ("--task", "images", "--out", out, "--eval-fraction", 0.3, *more, *QUICK)
    assert command(model, data, *words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    for part in ("ViTForImageClassification", "verify on 4 records: exact", "2 labels", "'cat', 'dog'", "accuracy",
                 "chosen by a hash of each one's file"):  # fmt: skip
        assert part in said, part
    assert card_of(out)["task"] == "images"
    if more == ("--lora", 2):
        peft = pytest.importorskip("peft")
        base = transformers.AutoModelForImageClassification.from_pretrained(model)
        found = peft.PeftModel.from_pretrained(base, out / "model")
        assert any("modules_to_save" in name for name, _ in found.named_parameters())  # the head is trained, and kept
        return
    found = transformers.AutoModelForImageClassification.from_pretrained(out / "model")
    assert found.config.id2label == {0: "cat", 1: "dog"}
    processor = transformers.AutoImageProcessor.from_pretrained(out / "model")
    assert processor(images=[Image.new("RGB", (9, 9))], return_tensors="pt")["pixel_values"].shape == (1, 3, 16, 16)
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["label2id"] == {"cat": 0, "dog": 1}


def test_what_is_loaded_of_a_network_whose_batch_norm_was_replaced(tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=2)
    model, kept = tmp_path / "resnet", []
    transformers.ResNetForImageClassification(config).save_pretrained(model)
    (model / "preprocessor_config.json").write_text((seer(tmp_path / "vit") / "preprocessor_config.json").read_text())
    monkeypatch.setattr(command_module, "train", lambda ready: kept.append(ready.model) or made(ready))
    data, out = pictures(tmp_path / "pets"), tmp_path / "out"
    assert command(model, data, "--task", "images", "--out", out, *QUICK) == 0
    assert capsys.readouterr().out.count("then fastdp.make_compatible(model)") == 2
    assert "fastdp.make_compatible(model)" in card_of(out)["released"]
    found = transformers.AutoModelForImageClassification.from_pretrained(out / "model")
    fastdp.make_compatible(found)
    x = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(found.eval()(x).logits, kept[0].eval()(x).logits)


def test_a_folder_of_timm(tmp_path, capsys):
    timm = pytest.importorskip("timm")
    model = tmp_path / "timm"
    model.mkdir()
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=10), str(model), safe_serialization=True)
    assert command(model, pictures(tmp_path / "pets"), "--task", "images", "--out", tmp_path / "out", *QUICK) == 0
    assert "TimmWrapperForImageClassification" in capsys.readouterr().out
    found = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out" / "model")
    assert found.config.id2label == {0: "cat", 1: "dog"}


def test_what_is_kept_in_memory_changes_nothing(tmp_path, monkeypatch):
    model, data, found = seer(tmp_path / "vit"), pictures(tmp_path / "pets"), []
    for name, most in (("all", 1 << 30), ("some", 3 * 4 * 3 * 16 * 16)):
        monkeypatch.setattr(images, "_KEPT", most)
        words = ("--task", "images", "--out", tmp_path / name, "--seed", 1, "--eval-fraction", 0, *QUICK)
        assert command(model, data, *words) == 0
        found.append((tmp_path / name / "model" / "model.safetensors").read_bytes())
    assert found[0] == found[1]


def test_an_image_that_changes_is_noticed(tmp_path):
    data = pictures(tmp_path / "pets")
    records = load(data, "--eval-fraction", 0).train
    processor = images.load_processor(str(seer(tmp_path / "vit")))
    (data / "cat" / "000.png").write_bytes((data / "dog" / "001.png").read_bytes())
    with pytest.raises(FinetuneError, match="000.png has changed"):
        images.Images(records, processor)


def test_who_is_held_out_depends_on_the_image_alone(tmp_path):
    data = pictures(tmp_path / "pets", 40)
    found = load(data, "--eval-fraction", 0.3)
    held = set(found.held_out.texts)
    assert 0 < len(held) < 40 and not held & set(found.train.texts)
    (data / "cat" / "000.png").rename(data / "cat" / "zzz.png")
    (data / "dog" / "001.png").unlink()
    again = load(data, "--eval-fraction", 0.3)
    left = set(again.train.texts) | set(again.held_out.texts)
    assert len(left) == 39 and set(again.held_out.texts) == held & left


def test_what_is_no_image(tmp_path):
    data = pictures(tmp_path / "pets")
    (data / "notes.txt").write_text("")
    (data / "cat" / ".hidden.png").write_text("")
    assert load(data).said == ["1 files are no images by their endings and are left out: 'notes.txt'"]
    (data / "cat" / "bad.png").write_bytes(b"damaged")
    whole = (data / "dog" / "001.png").read_bytes()
    (data / "dog" / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.new("I;16", (9, 9)).save(data / "dog" / "deep.png")
    (data / "dog" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(FinetuneError) as found:
        load(data)
    for words in ("4 of 28 images", "cat/bad.png: it is no image that Pillow knows", "dog/cut.png: ",
                  "dog/deep.png: its pixels have more than 8 bits", "dog/gone.png: ", "--skip-bad-rows 4"):  # fmt: skip
        assert words in str(found.value)
    assert len(load(data, "--skip-bad-rows", 4, "--eval-fraction", 0).train) == 24


def test_folders_that_cannot_be_used(tmp_path, capsys):
    data = pictures(tmp_path / "pets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FinetuneError, match="has no folders"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "cat").mkdir()
    with pytest.raises(FinetuneError, match="hold no images"):
        load(tmp_path / "empty")
    with pytest.raises(FinetuneError, match="have the label 'cat'"):
        load(pictures(tmp_path / "one", 4, ("cat",)))
    pictures(tmp_path / "set" / "train"), pictures(tmp_path / "set" / "val")
    with pytest.raises(FinetuneError, match=r"divided already(.|\n)*Give \S*/set/train --eval \S*/set/val"):
        load(tmp_path / "set")
    found = load(tmp_path / "set" / "train", "--eval", tmp_path / "set" / "val")
    assert len(found.train) == len(found.held_out) == 24
    with pytest.raises(FinetuneError, match=r"dog/001.png: the label 'dog' is none of 'cat', 'bird'"):
        load(data, "--labels", "cat,bird")
    with pytest.raises(FinetuneError, match="--group-by does not go with --task images"):
        load(data, "--group-by", "x")
    model = seer(tmp_path / "vit")
    assert "or --task images" in refused(capsys, model, data, "--task", "classify", "--out", tmp_path / "o", *QUICK)
    file = data / "cat" / "000.png"
    assert "is a file" in refused(capsys, model, file, "--task", "images", "--out", tmp_path / "o", *QUICK)
    (model / "preprocessor_config.json").unlink()
    said = refused(capsys, model, data, "--task", "images", "--out", tmp_path / "o", *QUICK)
    assert "preprocessor_config.json" in said
