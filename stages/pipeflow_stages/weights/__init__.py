"""Weights on their way from a trainer to whoever serves them."""
