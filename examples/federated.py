"""Federated learning on digits: private for clients, or for their records. `python examples/federated.py`

479 phones have three images each, mostly of one digit: DPFedAvg protects a phone with all that it has, and the phones
trust the server. Ten clinics have 143 images each, of one or two digits: each trains privately, which protects an
image, from the server as well.
"""

import torch
import torch.nn.functional as F
from digits import accuracy, digits
from torch import nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.mechanisms import DPFedAvg


def phones(x, y, rounds: int = 30, rate: float = 0.2) -> tuple[nn.Module, str]:
    model, own, delta = nn.Linear(64, 10), torch.arange(len(x)).chunk(479), 2e-4  # delta: well below 1 / 479
    sigma = fastdp.noise_multiplier_for(target_epsilon=8.0, delta=delta, sample_rate=rate, steps=rounds)
    fed = DPFedAvg(model, noise_multiplier=sigma, max_update_norm=1.0, clients=479, sample_rate=rate)
    for _ in range(rounds):
        for phone in fed.sample():
            with fed.client(phone) as local:  # a copy of the global model; the update is clipped as the block ends
                optimizer = torch.optim.SGD(local.parameters(), lr=0.5)
                for _ in range(4):
                    optimizer.zero_grad()
                    F.cross_entropy(local(x[own[phone]]), y[own[phone]]).backward()
                    optimizer.step()
        fed.step()
    return model, f"epsilon {fed.epsilon(delta):.2f} of a phone at delta {delta}"


def clinics(x, y, rounds: int = 10, rate: float = 1 / 3) -> tuple[nn.Module, str]:
    model, made, delta = nn.Linear(64, 10), [], 1e-4
    sigma = fastdp.noise_multiplier_for(target_epsilon=3.0, delta=delta, sample_rate=rate, steps=rounds * 3)
    for rows in torch.arange(len(x)).chunk(10):
        local = nn.Linear(64, 10)  # lives through all rounds: the optimizer of a new copy would count its own alone
        fastdp.verify(local, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), (x[rows], y[rows]))
        loader = fastdp.poisson_loader(TensorDataset(x[rows], y[rows]), sample_rate=rate)  # a round is a pass
        made.append((local, loader, fastdp.DPSGD(local, lr=1.0, noise_multiplier=sigma)))
    for _ in range(rounds):
        for local, loader, optimizer in made:
            local.load_state_dict(model.state_dict())
            for inputs, labels in loader:
                F.cross_entropy(local(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        states = [local.state_dict() for local, _, _ in made]
        model.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})
    return model, f"epsilon {optimizer.epsilon(delta):.2f} of an image at delta {delta}"


if __name__ == "__main__":
    data, x_test, y_test = digits(flat=True)
    order = torch.argsort(data.tensors[1], stable=True)
    for train in (phones, clinics):
        found, said = train(*(part[order] for part in data.tensors))
        print(f"{train.__name__}: accuracy {accuracy(found, x_test, y_test, torch.device('cpu')):.3f}, {said}")
