"""Helpers by the names and paths of opacus.utils."""
