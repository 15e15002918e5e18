"""Fine-tuning: rows of instruction data, how they are written for a model, and which of their tokens are trained."""
