"""The sections of a run's file."""
