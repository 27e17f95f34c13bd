"""Which rows belong to which sample."""
