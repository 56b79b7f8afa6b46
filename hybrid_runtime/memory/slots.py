"""Names for the two kinds of pool index, kept apart by the type checker, and for arrays of them."""

from __future__ import annotations

from typing import NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

KVSlot = NewType("KVSlot", int)
"""Index into the KV pool: one token's K and V in every attention layer. 0 is the null slot."""

StateSlot = NewType("StateSlot", int)
"""Index into the state pool: a whole recurrent state after exactly some number of tokens. 0 is the null slot."""

SlotArray: TypeAlias = NDArray[np.int32]
"""Slots of one pool, int32 `[n]`."""


def no_slots() -> SlotArray:
    return np.empty(0, dtype=np.int32)
