"""The flags of `python -m fastdp tune`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .parsing import declare

DESCRIPTION = """\
Search settings privately. The command makes a random, secret number of runs, each with a setting that is drawn at
random, and releases the best run alone. What the whole search costs is computed before it begins (Papernot and Steinke
2022).

WHAT is finetune, whose own arguments then follow after --, or FILE.py:NAME, a function train(setting, folder) that
trains with one setting, writes what is to be released into the folder, and returns (score, optimizer), or (score,
optimizer.history). Higher scores are better."""

EPILOG = """\
exit codes: 0 the best run was released (or, with --distribution poisson, no run was drawn); 1 the search was refused or
failed, and the message says why; 2 the flags were used wrongly; 130 it was interrupted.

examples:
  python -m fastdp tune my_script.py:train --settings settings.json --delta 1e-6 --held-out public --dry-run
  python -m fastdp tune finetune --settings settings.json --delta 1e-6 --held-out public -- ./minilm reviews.csv \\
      --task classify --epsilon 2 --eval public_reviews.csv"""

FLAGS: dict[str, dict[str, Any]] = {
    "what": dict(metavar="WHAT", help="finetune, or FILE.py:NAME"),
    "--settings": dict(
        type=Path, required=True, metavar="FILE",
        help="a JSON list of the settings to search, each an object. For finetune its names are flags (lr, epochs). "
        "For a function it also holds what a run spends: noise_multiplier, sample_rate and steps, or history, a list "
        "of them",
    ),
    "--delta": dict(type=float, required=True, metavar="D", help="delta of the guarantee of the search"),
    "--held-out": dict(
        choices=("public", "private"), required=True,
        help="whether the records that the score is computed from are public. If they are private, the score gets "
        "noise (--score-noise)",
    ),
    "--score-noise": dict(
        type=float, metavar="S",
        help="with --held-out private: the standard deviation of the noise on the sum of the records' scores, each "
        "from 0 to 1",
    ),
    "--expected-runs": dict(
        type=float, default=8.0, metavar="M", help="the expected number of runs (default: %(default)s)"
    ),
    "--distribution": dict(
        choices=("negative-binomial", "poisson"), default="negative-binomial",
        help="of the number of runs; with poisson there may be none (default: %(default)s)",
    ),
    "--eta": dict(
        type=float, default=0.0, metavar="E",
        help="the shape of the negative binomial distribution, above -1 (default: 0, logarithmic; 1 is geometric)",
    ),
    "--out": dict(
        type=Path, default=Path("fastdp-tune"), metavar="DIR",
        help="the folder for the best run and the card; it must be new or empty (default: %(default)s)",
    ),
    "--dry-run": dict(action="store_true", help="say what the search would cost, and stop"),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    declare(parser, FLAGS, DESCRIPTION, EPILOG)
    parser.usage = (
        "python -m fastdp tune WHAT --settings FILE --delta D --held-out public|private [flags] [-- ARGUMENTS]"
    )
