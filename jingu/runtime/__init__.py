"""The machine under a run: ranks, devices, clocks, logs and signals."""
