"""Text-model resources from Hugging Face checkpoints."""
