"""The static tensors that one model step reads."""
