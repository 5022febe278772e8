"""Comparing saved states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same(a: Any, b: Any) -> bool:
    """Equal, down to the bits of tensors."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
