"""All planted bugs: each step is right (tests/audit/audit_hand.py) but for one thing, which fastdp.audit must find.

PLANTED maps the bug's name to what makes the step and the tests that must find it. Where another library had the bug,
its docstring says so.
"""

from . import (  # noqa: F401  (they plant)
    audit_zoo_clipping,
    audit_zoo_distribution,
    audit_zoo_each,
    audit_zoo_noise,
    audit_zoo_steps,
    audit_zoo_thresholds,
)
from .audit_hand import PLANTED
from .audit_right import Large, Small
from .audit_zoo_clipping import NoClipping

LATER = tuple(
    module.__name__ for module in (audit_zoo_distribution, audit_zoo_steps, audit_zoo_thresholds, audit_zoo_each)
)
FIRST = [name for name, (made, _) in PLANTED.items() if made.__module__ not in LATER]  # those that libraries had
SCALED = (
    "noise cut at 3 sigma", "momentum over sums without noise", "the last step's sum added again",
    "threshold min(C, median of the norms)", "threshold min(C, median of the norms), and noise of it",
    "noise of min(C, largest contribution)", "norm whose squares underflow in float16",
    "half the noise on the 4 coordinates of a bias", "sigma rounded down to a tenth", "no noise at every tenth step",
)  # fmt: skip
for _name in SCALED:
    for _inputs in (Large, Small):  # gradients far above every C, and far below
        _made, _found_by = PLANTED[_name]
        _own = {"make_batch": _inputs.make_batch, "scale": _inputs.scale}
        PLANTED[f"{_name}, {_inputs.__name__.lower()} inputs"] = type(_name, (_made,), _own), _found_by  # type: ignore[arg-type]

MISSED = (  # by the audit of an earlier version, with the variants of SCALED
    "noise cut at 2 sigma", "noise beyond 2 sigma drawn again", "noise beyond 3 sigma drawn again",
    "sum of 12 uniforms", "momentum over sums without noise, in the loop",
    "the last step's sum added again, in the loop", "no noise at every tenth step of the loop",
    "norm whose squares underflow, summed in float32",
    "class weights after clipping", "small class weights after clipping", "threshold of 10 C for label 3",
    "threshold of 2 C for label 0", "threshold of 1.03 C for label 3", "2 C at every fifth step", "10 C at step 6",
    "2 C at step 6", "2 C at step 6 of the loop", "a quarter of the noise on more than 40 samples",
    "noise times min(1, 40 / B)", "half the noise on no sample", "half the noise on two samples",
    "a tenth of the noise where the sum is small", "an empty batch adds the last sum again",
    "an empty batch adds half of the last sum again", "norms at the weights before the last update",
    "a record is never in two batches running", "records of the last batch at 0.3 of the rate",
)  # fmt: skip
ALWAYS = [*FIRST, *SCALED, *MISSED]

__all__ = ["ALWAYS", "FIRST", "PLANTED", "NoClipping"]
