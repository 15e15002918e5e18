"""The model: spec, layers, families and weight initialization. It is plain PyTorch, and knows nothing of ranks."""
