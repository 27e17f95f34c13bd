"""Private mechanisms beside DP-SGD: DP-FTRL, DP-FedAvg (clients), DP-SGD as a sampler, and searches over settings.

>>> tree_epsilon(noise_multiplier=10.0, steps_per_epoch=256, epochs=1, delta=1e-5) < 1.2
True
"""

from .cycle_loaders import CycleLoader, balls_in_bins_loader, cyclic_poisson_loader, fixed_order_loader, ftrl_loader
from .fedavg import DPFedAvg
from .ftrl import DPFTRL
from .langevin import check_unclipped, noise_multiplier_for_temperature, temperature
from .participation import Tree, nodes_over, tree_epsilon, tree_noise_multiplier
from .tree import variance_of
from .tuning import NegativeBinomialRuns, PoissonRuns, tuning_epsilon

__all__ = [
    "CycleLoader",
    "DPFTRL",
    "DPFedAvg",
    "NegativeBinomialRuns",
    "PoissonRuns",
    "Tree",
    "balls_in_bins_loader",
    "check_unclipped",
    "cyclic_poisson_loader",
    "fixed_order_loader",
    "ftrl_loader",
    "nodes_over",
    "noise_multiplier_for_temperature",
    "temperature",
    "tree_epsilon",
    "tree_noise_multiplier",
    "tuning_epsilon",
    "variance_of",
]
