"""How one model is laid out over many ranks, on PyTorch's own engines."""
