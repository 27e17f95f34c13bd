"""Whole training programs drawn at random: a forward, a loss, state, hooks and sizes. See `judge`."""
