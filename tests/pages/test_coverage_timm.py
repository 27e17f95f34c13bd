"""The suite of timm's models: chosen and made small by rules."""

from __future__ import annotations

import pytest

from benchmarks import coverage_timm as suite
from benchmarks.coverage import define_torchvision
from benchmarks.coverage_engines import fastdp_step
from benchmarks.coverage_truth import Sizes, judge

define_torchvision()
timm = pytest.importorskip("timm")


def test_architectures_are_pairs_of_module_and_class() -> None:
    found = suite.architectures()
    names = [name for names in found.values() for name in names]
    assert sorted(names) == sorted({n for m in timm.list_modules() for n in timm.list_models(module=m)})
    assert {"resnet.ResNet", "vision_transformer.VisionTransformer", "deit.VisionTransformerDistilled"} <= set(found)
    assert len({name.split(".")[0] for name in found}) == len(timm.list_modules()) <= len(found)


def test_asking_leaves_timm_as_it_was() -> None:
    own = timm.models.resnet.build_model_with_cfg
    model_class, options = suite.made_with("resnet18")
    assert model_class is timm.models.resnet.ResNet and options["layers"] == (2, 2, 2, 2)
    assert timm.models.resnet.build_model_with_cfg is own and timm.models.vgg.build_model_with_cfg is own
    changes = suite.shapes("resnet18")[0]
    assert changes["layers"] == (1, 1, 1, 1) and changes["num_classes"] == 4
    assert len(suite.made("resnet18", changes).layer1) == 1


@pytest.mark.parametrize("architecture", ["vision_transformer.VisionTransformer", "convnext.ConvNeXt"])
def test_a_model_of_timm(architecture: str) -> None:
    case = suite.cases()[architecture]
    assert not case.tokens and judge(case, Sizes(3), fastdp_step, "fastdp")["status"] == "exact"
