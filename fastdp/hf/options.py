"""What a private run is told beside TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..accounting import check_accountant, delta_problem


@dataclass
class PrivacyArguments:
    """Options of `DPTrainer`; a dataclass for HfArgumentParser beside TrainingArguments.

    Give target_epsilon (the noise is chosen for the run's steps, and the run stops before it would exceed it),
    noise_multiplier, or both (that noise; stop at the target). Raises ValueError on values without meaning.
    """

    target_epsilon: float | None = field(default=None, metadata={"help": "Privacy budget of the whole run."})
    noise_multiplier: float | None = field(
        default=None, metadata={"help": "Standard deviation of the noise over the clipping norm."}
    )
    delta: float | None = field(
        default=None, metadata={"help": "delta of (epsilon, delta); default 1 / (2 n) of n records (or groups)."}
    )
    per_sample_max_grad_norm: float = field(
        default=1.0,
        metadata={"help": "Clipping norm of every sample's gradient (not TrainingArguments.max_grad_norm)."},
    )
    clipping: str = field(default="local", metadata={"help": "local, global or automatic (or a function, in Python)."})
    style: str = field(default="flat", metadata={"help": "flat or layerwise."})
    accountant: str = field(default="prv", metadata={"help": "prv, rdp or gdp."})
    sample_rate: float | None = field(
        default=None,
        metadata={
            "help": "Probability of a record to be in a batch; default per_device_train_batch_size x "
            "gradient_accumulation_steps / n."
        },
    )
    group_by: str | None = field(
        default=None, metadata={"help": "Column whose equal values form one sample: protects people, not records."}
    )
    max_records_per_group: int | None = field(
        default=None, metadata={"help": "With group_by: at most so many records of a group in a step."}
    )
    memory_budget: int | None = field(default=None, metadata={"help": "Bytes to hold in backward for norms and sums."})
    verify: bool = field(
        default=True, metadata={"help": "Check the model and the loss on a few records before training."}
    )
    noise_seed: int | None = field(
        default=None, metadata={"help": "Repeatable sampling and noise, for experiments: voids the guarantee."}
    )
    count_lost_steps: bool = field(
        default=True,
        metadata={"help": "After a resume, count the steps made after the checkpoint too: others may have seen them."},
    )
    log_clipped_share: bool = field(
        default=False, metadata={"help": "Log the share of clipped samples; the guarantee does not cover it."}
    )

    def __post_init__(self) -> None:
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ValueError("PrivacyArguments needs target_epsilon= or noise_multiplier= (0 for none)")
        if self.target_epsilon is not None and not 0 < self.target_epsilon < float("inf"):
            raise ValueError(f"target_epsilon must be positive and finite, not {self.target_epsilon!r}")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < float("inf"):
            raise ValueError(f"noise_multiplier must be 0 or larger and finite, not {self.noise_multiplier!r}")
        if self.target_epsilon is not None and self.noise_multiplier == 0:
            raise ValueError("noise_multiplier=0 has no epsilon: leave target_epsilon out")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must lie in (0, 1), not {self.delta!r}")
        if self.max_records_per_group is not None and self.group_by is None:
            raise ValueError("max_records_per_group needs group_by")
        if self.log_clipped_share and self.style != "flat":
            raise ValueError("log_clipped_share needs style='flat'")
        check_accountant(self.accountant)

    def delta_for(self, records: int) -> float:
        """delta of a run on this many records: 1 / (2 n) unless given. ValueError where it is 1 / n or more.

        At delta = 1 / n a mechanism that publishes one record in full would count as private.
        """
        delta = 1 / (2 * records) if self.delta is None else self.delta
        if problem := delta_problem(delta, records, "record" if self.group_by is None else "group of records"):
            raise ValueError(f"{problem}. Leave delta out for {1 / (2 * records):g}")
        return delta

    def engine_options(self) -> dict[str, Any]:
        """Of `fastdp.privatize`."""
        return {
            "max_grad_norm": self.per_sample_max_grad_norm,
            "clipping": self.clipping,
            "style": self.style,
            "accountant": self.accountant,
            "memory_budget": self.memory_budget,
            "seed": self.noise_seed,
        }
