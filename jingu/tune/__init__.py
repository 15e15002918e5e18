"""Fine-tuning: reading and tokenizing instruction data, previews of the trained tokens, and merging adapters."""
