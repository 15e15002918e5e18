"""The watchdog of a run: what each rank does, and which rank keeps the others waiting."""
