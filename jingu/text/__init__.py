"""Text: the corpus as documents, and the tokenizer that turns them into ids."""
