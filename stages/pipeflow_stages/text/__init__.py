"""Tokens: templates, batches, generation."""
