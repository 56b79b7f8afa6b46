"""From tokens to text: incremental detokenization and stop strings. No torch."""
