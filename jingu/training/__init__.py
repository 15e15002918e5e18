"""The loop, and what a step is made of."""
