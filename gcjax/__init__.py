"""Geometric continuity of neural networks: measure how singular vectors line up from layer to layer, and why."""
