"""The options of a private run, in addition to TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..accounting import check_accountant, default_delta, delta_problem
from ..utils.keyword_arguments import named
from .correlated import check_noise


@dataclass
class PrivacyArguments:
    """The privacy options of `DPTrainer`, as a dataclass for HfArgumentParser, next to TrainingArguments.

    Give target_epsilon, noise_multiplier, or both. With target_epsilon alone, the noise is chosen for the steps of the
    run, and the run stops before it would exceed the target. With both, the run uses that noise and stops at the
    target.

    Attributes:
        target_epsilon: the privacy budget of the whole run, positive and finite.
        noise_multiplier: the standard deviation of the noise over the clipping norm; 0 adds no noise.
        delta: the delta of the guarantee, below 1 / n for n records (or groups). The default is 1 / (10 n),
            rounded down to one digit.
        per_sample_max_grad_norm: the clipping norm of each sample's gradient.
        clipping: "local", "global", "automatic", "adaptive", or a function from norms [B] to factors [B].
        target_quantile, quantile_rate, count_noise: of adaptive clipping, as in `fastdp.privatize`.
        style: "flat" or "layerwise".
        accountant: "prv", "rdp" or "gdp".
        noise: correlated noise: "bisr:4", "lambda:0.9", "banded:8", "tree" or "independent", or a strategy of
            `fastdp.mechanisms`.
        sampling: "poisson", or with noise "fixed_order" (the default then, shuffled once) or "cyclic_poisson".
        sample_rate: the probability that a record is in a batch. The default is per_device_train_batch_size x
            gradient_accumulation_steps / n.
        group_by: a column; all records with the same value form one sample, so that the guarantee protects persons.
        max_records_per_group: with group_by, the largest number of records of a group in a step.
        memory_budget: the bytes that may be held in backward for norms and sums.
        graphed: whether forward and backward are recorded once for each shape of a batch, and replayed without Python
            (`optimizer.graphed`). Pad to few lengths: `pad_to_multiple_of=64` of the collator, say.
        fused_loss: whether a causal language model's head and loss run as one function, without storing logits
            (`fastdp.losses.linear_cross_entropy`). Models that change logits in an unknown way are refused.
        verify: whether to check the model and the loss on a few records before training.
        noise_seed: makes sampling and noise repeatable, for experiments. It voids the guarantee.
        count_lost_steps: after a resume, whether to count the steps that were made after the checkpoint.
        repeat_lost_steps: whether a killed run repeats the steps since its last checkpoint bit for bit, at no cost. Its
            keys are kept until it is over in `<output_dir>.secret.key`: whoever has them can take the noise off.
        log_clipped_share: whether to log the share of clipped samples and quantiles of their norms, which the guarantee
            does not cover.

    Raises:
        ValueError: if a value is out of range, or options contradict each other.
    """

    target_epsilon: float | None = field(default=None, metadata={"help": "The privacy budget of the whole run."})
    noise_multiplier: float | None = field(
        default=None, metadata={"help": "The standard deviation of the noise over the clipping norm."}
    )
    delta: float | None = field(
        default=None, metadata={"help": "The delta of the guarantee (default: 1 / (10 n) for n records or groups)."}
    )
    per_sample_max_grad_norm: float = field(
        default=1.0,
        metadata={"help": "The clipping norm of each sample's gradient (not TrainingArguments.max_grad_norm)."},
    )
    clipping: str = field(
        default="local", metadata={"help": "local, global, automatic or adaptive (in Python, also a function)."}
    )
    target_quantile: float | None = field(
        default=None, metadata={"help": "Of adaptive clipping: the share of samples that is not clipped (0.5)."}
    )
    quantile_rate: float | None = field(
        default=None, metadata={"help": "Of adaptive clipping: how fast the clipping norm moves (0.2)."}
    )
    count_noise: float | None = field(
        default=None,
        metadata={"help": "Of adaptive clipping: the deviation of the noise on the count (a twentieth of the batch)."},
    )
    style: str = field(default="flat", metadata={"help": "flat or layerwise."})
    accountant: str = field(default="prv", metadata={"help": "prv, rdp or gdp."})
    noise: str | None = field(
        default=None,
        metadata={
            "help": "Correlated noise: bisr:4, lambda:0.9, banded:8, tree or independent (in Python, also a strategy)."
        },
    )
    sampling: str | None = field(
        default=None, metadata={"help": "poisson; with noise, fixed_order (its default) or cyclic_poisson."}
    )
    sample_rate: float | None = field(
        default=None,
        metadata={
            "help": "The probability that a record is in a batch (default: per_device_train_batch_size x "
            "gradient_accumulation_steps / n)."
        },
    )
    group_by: str | None = field(
        default=None,
        metadata={"help": "A column; all records with the same value form one sample. Protects people, not records."},
    )
    max_records_per_group: int | None = field(
        default=None, metadata={"help": "With group_by: the largest number of records of a group in a step."}
    )
    memory_budget: int | None = field(
        default=None, metadata={"help": "The bytes that backward may hold for norms and sums."}
    )
    graphed: bool = field(
        default=False,
        metadata={"help": "Record forward and backward once for each shape of a batch, and replay them."},
    )
    fused_loss: bool = field(
        default=False,
        metadata={"help": "Compute the loss of a causal language model without storing its logits."},
    )
    verify: bool = field(
        default=True, metadata={"help": "Check the model and the loss on a few records before training."}
    )
    noise_seed: int | None = field(
        default=None,
        metadata={"help": "Make sampling and noise repeatable, for experiments; this voids the guarantee."},
    )
    count_lost_steps: bool = field(
        default=True,
        metadata={"help": "After a resume, also count the steps made after the checkpoint; others may have seen them."},
    )
    repeat_lost_steps: bool = field(
        default=False,
        metadata={"help": "Keep the run's keys beside output_dir, to repeat lost steps exactly after a resume."},
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
        if self.graphed and (self.group_by is not None or self.memory_budget is not None):
            raise ValueError("graphed=True replays batches of records: leave group_by and memory_budget out")
        if self.fused_loss and self.graphed:
            raise ValueError("fused_loss=True stores no logits for graphed=True to replay: leave one of them out")
        if self.log_clipped_share and self.style != "flat":
            raise ValueError("log_clipped_share needs style='flat'")
        check_accountant(self.accountant)
        check_noise(self)

    def delta_for(self, records: int) -> float:
        """Return the delta of a run on this many records: `accounting.default_delta` unless it was given.

        Raises ValueError if delta is 1 / n or more: at 1 / n, a mechanism that publishes one record in full would count
        as private.
        """
        delta = default_delta(records) if self.delta is None else self.delta
        if problem := delta_problem(delta, records, "record" if self.group_by is None else "group of records"):
            raise ValueError(f"{problem}. Leave delta out for {default_delta(records):g}")
        return delta

    def engine_options(self) -> dict[str, Any]:
        """Return the options for `fastdp.privatize`."""
        return {
            "max_grad_norm": self.per_sample_max_grad_norm,
            "clipping": self.clipping,
            "target_quantile": self.target_quantile,
            "quantile_rate": self.quantile_rate,
            "count_noise": self.count_noise,
            "style": self.style,
            "accountant": self.accountant,
            "memory_budget": self.memory_budget,
            "seed": self.noise_seed,
        }


PrivacyArguments.__init__ = named(PrivacyArguments.__init__)  # type: ignore[method-assign]
