"""Payloads as bytes. The specification is docs/wire-format.md; golden files pin it."""

from __future__ import annotations

from .codec import Decoded, Encoded, MessageCodec, Opened
from .header import HEADER_BYTES, Header
from .indices import INDEX_FORMATS
from .values import SPARSE_VALUES, value_format

__all__ = [
    "HEADER_BYTES",
    "INDEX_FORMATS",
    "SPARSE_VALUES",
    "Decoded",
    "Encoded",
    "Header",
    "MessageCodec",
    "Opened",
    "value_format",
]
