"""From files of examples to batches of tokens."""
