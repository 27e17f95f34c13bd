"""What `python -m fastdp` runs, but for the guests' own commands."""
