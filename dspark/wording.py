"""Counted nouns, as a reader expects them: 1 prompt, 2 prompts, 0 prompts."""

from __future__ import annotations


def counted(count: int, noun: str, style: str = "") -> str:
    """The number, formatted by `style`, and the noun, with an s unless it is one thing."""
    return f"{count:{style}} {noun}" if count == 1 else f"{count:{style}} {noun}s"
