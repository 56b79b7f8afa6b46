"""Checks of options and parameters, which turn a wrong value into a message that names it."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

INT64_MAX = 2**63 - 1


def invalid(name: str, value: object, reason: str) -> ValueError:
    """The error for a wrong value, to be raised by the caller."""
    return ValueError(f"{name} {reason}, not {value!r}")


def require_int(name: str, value: object, *, minimum: int, maximum: int | None = None) -> None:
    """Raises ValueError unless `value` is an integer (a bool is none) in `minimum..maximum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise invalid(name, value, "must be an integer")
    if int(value) < minimum or (maximum is not None and int(value) > maximum):
        raise invalid(name, value, f"must be at least {minimum}" + ("" if maximum is None else f", at most {maximum}"))


def normalize_integers(instance: Any) -> None:
    """Makes every integer field of a frozen dataclass a plain int: NumPy's would overflow in later arithmetic."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, Integral) and not isinstance(value, bool):
            object.__setattr__(instance, field.name, int(value))


def require_number(name: str, value: object, *, minimum: float = -math.inf, maximum: float = math.inf) -> None:
    """Raises ValueError unless `value` is a finite number (a bool is none) in `minimum..maximum`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
        raise invalid(name, value, "must be a finite number")
    if not minimum <= float(value) <= maximum:
        raise invalid(name, value, f"must be in [{minimum}, {maximum}]")


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def require_bool(name: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise invalid(name, value, "must be True or False")


def require_choice(name: str, value: object, choices: Iterable[str | None]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    allowed = tuple(choices)
    if not (value is None or isinstance(value, str)) or value not in allowed:
        raise invalid(name, value, f"must be one of {', '.join(map(repr, allowed))}")


def require_known(names: Iterable[str], fields: Iterable[str], owner: str) -> None:
    """Raises ValueError for the first of `names` that is none of `owner`'s `fields`, suggesting the closest."""
    known = list(fields)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; the fields are {', '.join(known)}"
            raise ValueError(f"{owner} has no field {name!r}{hint}")
