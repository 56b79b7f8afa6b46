"""A picture of the prefix cache: what is in it, as text and as a page."""
