"""Clip, add noise, update and count: private optimizers and what keeps their guarantee true."""
