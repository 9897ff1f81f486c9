"""Pretrained checkpoints: read, measured, converted."""
