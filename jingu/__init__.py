"""jingu: from raw text to a served language model with one tool, one file and one training loop."""

__version__ = "0.1.0"
