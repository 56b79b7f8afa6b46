"""One file per operation: its recurrent definition (the oracle), its chunked form and its one-token form."""
