"""Numbers as people read them."""

from __future__ import annotations

from fractions import Fraction

_UNITS = ("B", "kB", "MB", "GB", "TB")


def format_bytes(nbytes: int | Fraction) -> str:
    """Three digits and a decimal unit: ``7.50 GB`` is 7.5e9 bytes."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    if unit == 0 or value >= 99.95:
        return f"{value:.0f} {_UNITS[unit]}"
    return f"{value:.1f} {_UNITS[unit]}" if value >= 9.995 else f"{value:.2f} {_UNITS[unit]}"


def format_count(value: int | Fraction) -> str:
    """``1,684,594,688``; a fraction, which only averages are, is rounded."""
    return f"{round(value):,}"
