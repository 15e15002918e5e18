"""Evaluation: tasks in files, scores of models on them, and statistics of these scores."""
