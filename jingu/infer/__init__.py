"""Inference: the engine with its scheduler, KV cache and samplers; loading models for it; `jingu generate`."""
