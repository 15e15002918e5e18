"""Checkpoints: logical tensors on disk, any layout in and out, nothing that can lie."""
