"""Uses of parameters."""
