"""The model: its spec, its layers, its families and its first weights. Plain PyTorch that knows nothing of ranks."""
