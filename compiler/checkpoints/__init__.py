"""Quantised checkpoints of other tools: read, checked, written, converted, and compiled from."""
