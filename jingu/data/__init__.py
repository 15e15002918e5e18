"""Data: indexed shards of token ids built from a corpus, and the batch of each step as a pure function of them."""
