"""opacus.utils."""
