"""python -m fastdp demo | info"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m fastdp", description="Exact differentially private training.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train on scikit-learn's digits with privacy; downloads nothing")
    demo.add_argument(
        "--out", type=Path, default=Path("fastdp-demo"), help="folder of the plots (default: %(default)s)"
    )
    commands.add_parser("info", help="versions, backends and devices")
    options = parser.parse_args()
    if options.command == "demo":
        from .demo import main as run

        run(options.out)
    else:
        from .info import report

        print(report())


if __name__ == "__main__":
    main()
