"""Documents, examples, experiments and benchmarks: what they say is true."""
