"""The stage library of pipeflow: data, text, Hugging Face models, DFlash, weights."""
