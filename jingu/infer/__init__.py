"""From a model to text: the key-value cache, sampling, and generation."""
