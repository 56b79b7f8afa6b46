"""How the prefill tokens of one step are shared."""

from __future__ import annotations

from collections.abc import Sequence


def share_budget(budget: int, wanted: Sequence[int]) -> list[int]:
    """Max-min fair shares: nobody gets more than wanted, and what the small ones leave goes to the large ones.

    Tokens that do not divide evenly go to the largest claims, among equals to the earliest.
    """
    shares = [0] * len(wanted)
    for served, index in enumerate(sorted(range(len(wanted)), key=lambda i: (wanted[i], -i))):
        shares[index] = min(wanted[index], budget // (len(wanted) - served))
        budget -= shares[index]
    return shares
