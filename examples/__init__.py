"""Examples, run from a checkout."""
