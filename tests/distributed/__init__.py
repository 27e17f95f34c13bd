"""Several processes that train one model, on gloo."""
