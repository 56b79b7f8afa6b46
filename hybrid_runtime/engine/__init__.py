"""The loop: schedule, load, copy, run, apply; and what a user's request is made of."""
