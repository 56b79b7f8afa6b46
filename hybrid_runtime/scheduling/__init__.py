"""Which requests run in the next step, and on which slots. No torch."""
