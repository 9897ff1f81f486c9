"""From a config to results: optimizers, sweeps, the training loop, checkpoints."""
