"""Look at a model, a loss and records, and change nothing: the parts of `fastdp.verify`, and pictures in characters."""
