"""Foresight: memory, time, communication and cost of a run, before it starts and without a process group."""
