"""The machine under a run: ranks, devices, files, logs and signals."""
