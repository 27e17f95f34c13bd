"""Private mechanisms beside DP-SGD: DP-FTRL, DP-FedAvg (clients), DP-SGD as a sampler, and searches over settings.

Strategies correlate the noise of steps, and `compare` says which one has the least noise for a run.

>>> tree_epsilon(noise_multiplier=10.0, steps_per_epoch=256, epochs=1, delta=1e-5) < 1.2
True
>>> Lambda(0.9).noise_row(step=5)  # the step's own normal, less a part of the last step's
(1.0, [(1, -0.9)])
"""

from ..accounting.participation import Participation
from .banded import Banded
from .comparison import Comparison, compare
from .correlated_privacy import Block, epsilon_of_blocks, noise_multiplier_for_strategy
from .cycle_loaders import CycleLoader, balls_in_bins_loader, cyclic_poisson_loader, fixed_order_loader, ftrl_loader
from .fedavg import DPFedAvg
from .ftrl import DPFTRL
from .langevin import check_unclipped, noise_multiplier_for_temperature, temperature
from .participation import Tree, nodes_over, tree_epsilon, tree_noise_multiplier
from .sensitivity import sensitivity
from .strategies import Bisr, Independent, Lambda, Matrix, Strategy, TreeAggregation
from .tree import variance_of
from .tuning import NegativeBinomialRuns, PoissonRuns, tuning_epsilon

__all__ = [
    "Banded",
    "Bisr",
    "Block",
    "Comparison",
    "CycleLoader",
    "DPFTRL",
    "DPFedAvg",
    "Independent",
    "Lambda",
    "Matrix",
    "NegativeBinomialRuns",
    "Participation",
    "PoissonRuns",
    "Strategy",
    "Tree",
    "TreeAggregation",
    "balls_in_bins_loader",
    "check_unclipped",
    "compare",
    "cyclic_poisson_loader",
    "epsilon_of_blocks",
    "fixed_order_loader",
    "ftrl_loader",
    "nodes_over",
    "noise_multiplier_for_strategy",
    "noise_multiplier_for_temperature",
    "sensitivity",
    "temperature",
    "tree_epsilon",
    "tree_noise_multiplier",
    "tuning_epsilon",
    "variance_of",
]
