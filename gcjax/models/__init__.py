"""Networks whose layers are born as one stacked parameter: one file a model, each handing out its stacks as `W[out, in]`."""
