"""One backward to the norms and clipped sums of per-sample gradients."""
