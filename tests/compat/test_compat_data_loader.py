"""DPDataLoader and its collate function against Opacus's."""

from __future__ import annotations

import pytest
import torch
from opacus import data_loader as theirs
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from fastdp.compat.opacus import data_loader as ours

BATCHES = {
    "tensors": [(torch.ones(3), torch.tensor(1))] * 2,
    "mapping": [{"x": torch.ones(2, 3), "y": [torch.zeros(1)]}] * 2,
    "one tensor": [torch.ones(4)] * 2,
}


def shapes(batch):
    if torch.is_tensor(batch):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, dict):
        return {key: shapes(value) for key, value in batch.items()}
    return type(batch), [shapes(value) for value in batch]


@pytest.mark.parametrize("options", [{}, {"rand_on_empty": True}, {"batch_first": False}])
@pytest.mark.parametrize("name", BATCHES)
def test_an_empty_batch_looks_like_the_first(name, options):
    if name == "tensors" and options == {"batch_first": False}:
        pytest.skip("labels have no second dimension")
    if name != "mapping" and options == {"batch_first": False}:
        options = {}
    found = []
    for lib in (theirs, ours):
        collate = lib.wrap_collate_with_empty(collate_fn=default_collate, **options)
        full = collate(BATCHES[name])
        found.append((shapes(full), shapes(collate([]))))
    assert found[0] == found[1]


@pytest.mark.parametrize("lib", [theirs, ours])
def test_before_the_first_batch(lib):
    known = lib.CollateFnWithEmpty(None, sample_empty_shapes=[(0, 3), (0,)], dtypes=[torch.float32, torch.int64])
    assert shapes(known([])) == (list, [((0, 3), torch.float32), ((0,), torch.int64)])
    assert lib.CollateFnWithEmpty(None)([]) == [] and lib.CollateFnWithEmpty(None)([1, 2]) == [1, 2]
    texts = lib.CollateFnWithEmpty(lambda batch: {"text": "a"})
    texts([1])
    with pytest.raises(TypeError, match="Unsupported batch type: str"):
        texts([])
    assert (lib.shape_safe(torch.ones(2)), lib.shape_safe(1), lib.dtype_safe(1)) == ((2,), (), int)


def test_the_loader_keeps_what_the_other_had():
    data = TensorDataset(torch.arange(40.0))
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(data, batch_size=4, collate_fn=lambda rows: torch.stack([r[0] for r in rows]) + 1,
                        generator=generator, timeout=0, drop_last=True)  # fmt: skip
    made = ours.DPDataLoader.from_data_loader(loader)
    assert isinstance(made, DataLoader) and made.dataset is data and made.generator is generator
    assert (made.sample_rate, len(made), made.batch_sampler.generator) == (0.1, 10, generator)
    seen = torch.cat([batch for _ in range(30) for batch in made])
    assert abs(len(seen) / 30 - 40) < 4 and set(seen.tolist()) == set(range(1, 41))
    first = [b.tolist() for b in made]
    generator.manual_seed(5)
    second = [b.tolist() for b in made]
    generator.manual_seed(5)
    assert second == [b.tolist() for b in made] and first != second

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1])

    with pytest.raises(ValueError, match="IterableDataset"):
        ours.DPDataLoader.from_data_loader(DataLoader(Stream()))


def test_records_that_are_mappings():
    data = [{"x": torch.ones(3), "y": n} for n in range(20)]
    loader = ours.DPDataLoader(data, sample_rate=0.2)
    assert len(loader) == 5 and sum(len(batch["y"]) for batch in loader if isinstance(batch, dict)) > 0


@pytest.mark.parametrize("poisson", [False, True])
def test_switching_the_generator(poisson):
    data, generator = TensorDataset(torch.arange(20.0)), ours.SecureGenerator()
    loader = ours.DPDataLoader(data, sample_rate=0.5) if poisson else DataLoader(data, 5, shuffle=True)
    sampler = ours.switch_generator(data_loader=loader, generator=generator).batch_sampler
    assert (sampler if poisson else sampler.sampler).generator is generator


def test_the_data_module_of_lightning_samples_by_its_generator():
    module = pytest.importorskip("lightning.pytorch")
    from fastdp.compat.opacus.lightning import DPLightningDataModule

    class Data(module.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)

        def val_dataloader(self):
            return "validation"

    generator = torch.Generator()
    made = DPLightningDataModule(Data(), generator)
    assert made.train_dataloader().batch_sampler.generator is generator and made.val_dataloader() == "validation"
