"""Numbers as people read them."""

from __future__ import annotations


def microseconds(value: float) -> str:
    """``12.3 us``, ``4.56 ms``, ``7.89 s``."""
    if abs(value) < 1e3:
        return f"{value:.1f} us"
    return f"{value / 1e3:.2f} ms" if abs(value) < 1e6 else f"{value / 1e6:.2f} s"


def nbytes(value: float) -> str:
    """In units of 2**10."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def flops(value: float) -> str:
    """In units of 10**3."""
    for unit in ("flop", "kflop", "Mflop", "Gflop", "Tflop"):
        if abs(value) < 1e3 or unit == "Tflop":
            return f"{value:.0f} {unit}" if unit == "flop" else f"{value:.1f} {unit}"
        value /= 1e3
    raise AssertionError("unreachable")


def shortened(text: str, width: int) -> str:
    """At most ``width`` characters, with dots instead of the head: names differ at their ends."""
    return text if len(text) <= width else f"..{text[len(text) - (width - 2) :]}"
