"""A page that follows one request through the pools, the request table and the tree: README.md beside this file.

All that it shows was printed by the code that it shows; `python -m hybrid_runtime.walkthrough` runs it anew.
"""

from hybrid_runtime.walkthrough.report import show

__all__ = ["show"]
