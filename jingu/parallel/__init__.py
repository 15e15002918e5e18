"""Lay one model out over many ranks, with PyTorch's FSDP2, DTensor and pipeline schedules."""
