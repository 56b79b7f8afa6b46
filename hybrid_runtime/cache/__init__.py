"""The prefix cache: a radix tree over token sequences whose nodes own KV slots and state slots. No torch."""
