"""The version of Opacus whose names, signatures and defaults these are."""

__version__ = "1.6.0"
