"""Pages that follow requests through the pools, the request table and the tree: README.md beside this file first.

All that they show was printed by the code that they show; `python -m hybrid_runtime.walkthrough` runs it anew.
"""

from hybrid_runtime.walkthrough.report import show
from hybrid_runtime.walkthrough.rounds import show_step

__all__ = ["show", "show_step"]
