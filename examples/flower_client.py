"""A Flower client that trains privately: its images are protected from the server, too. `pip install flwr`

Flower may make the client anew in every round. Its ledger's file lives on: epsilon is of all rounds together, and the
client makes no step beyond its budget, whatever the server asks for. `python examples/flower_client.py` runs ten rounds
of ten clinics with one or two digits each in this process; `app` is for Flower's own processes.
"""

import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import accuracy, digits
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

import fastdp

EPSILON, DELTA, ROUNDS, CLINICS = 3.0, 1e-4, 10, 10
FOLDER = Path(tempfile.mkdtemp())  # of this demonstration: a client's must stay
warnings.filterwarnings("ignore", message="the ledger file holds")  # the steps of the rounds before, as it should


class Clinic(NumPyClient):
    def __init__(self, number: int) -> None:
        data, self.ledger = digits(flat=True)[0], FOLDER / f"clinic{number}.ledger"
        self.data = TensorDataset(*data[torch.argsort(data.tensors[1], stable=True).chunk(CLINICS)[number]])

    def fit(self, parameters, config):
        model, loader = nn.Linear(64, 10), fastdp.poisson_loader(self.data, sample_rate=1 / 3)  # a round is a pass
        vector_to_parameters(torch.tensor(parameters[0]), model.parameters())
        fastdp.verify(model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), self.data)
        optimizer = fastdp.DPSGD(model, lr=1.0, target_epsilon=EPSILON, delta=DELTA, epochs=ROUNDS, loader=loader,
                                 ledger=self.ledger)  # fmt: skip
        try:
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            metrics = {"epsilon": optimizer.epsilon(DELTA)} if config.get("report") else {}
        finally:
            optimizer.detach()  # closes the file for the next round's optimizer
        return [parameters_to_vector(model.parameters()).detach().numpy()], 1, metrics  # 1: clinics weigh the same


app = ClientApp(client_fn=lambda context: Clinic(int(context.node_config["partition-id"])).to_client())

if __name__ == "__main__":
    model = nn.Linear(64, 10)
    for left in reversed(range(ROUNDS)):
        weights = [parameters_to_vector(model.parameters()).detach().numpy()]
        answers = [Clinic(number).fit(weights, {"report": not left}) for number in range(CLINICS)]
        vector_to_parameters(torch.tensor(sum(found for (found,), *_ in answers) / CLINICS), model.parameters())
    found = accuracy(model, *digits(flat=True)[1:], torch.device("cpu"))
    print(f"accuracy {found:.3f}, epsilon {answers[0][2]['epsilon']:.2f} of an image at delta {DELTA}")
