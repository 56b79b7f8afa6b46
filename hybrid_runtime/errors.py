"""Exceptions that callers may want to handle. A caller's plain mistake raises `ValueError` instead."""


class PoolExhausted(Exception):
    """A pool has fewer free slots than were asked for; nothing was allocated."""


class ReentrantCallError(RuntimeError):
    """A runtime was called from within one of its own steps, by a signal handler or a finalizer."""


class UnsupportedModelError(ValueError):
    """The model's architecture, or an option of its config, has no adapter in this runtime."""
