"""Data loading: Poisson sampling, grouping by person, and checks of samplers and of collate functions."""
