"""Flax on oneflax: parameter rules, and the nnx adapter."""
