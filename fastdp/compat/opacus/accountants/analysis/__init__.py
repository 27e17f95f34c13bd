"""The mathematics of the accountants: Opacus's own."""
