"""The training loop, the parts of a step, and the commands that use them."""
