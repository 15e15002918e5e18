"""Checkpoints: whole tensors on disk with checksums, saved from and loaded into any parallel layout."""
