"""Private optimizers, loaders and losses."""
