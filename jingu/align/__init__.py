"""Alignment: preference learning, reward models, and learning from rewards, as tasks of the one training loop."""
