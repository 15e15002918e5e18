"""Data: a corpus as indexed shards of tokens, and the batch of step n as a pure function of them."""
