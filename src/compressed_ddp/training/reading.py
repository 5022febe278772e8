"""A file from outside as data: its bytes become tensors and plain values, or an error, and nothing else.

``weights_only`` keeps torch from running what a file asks for. It does not keep a small file from
asking for much memory, nor from holding things that nobody here expects. That is checked here.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from .records import check_state, records_of

_DEEPEST = 32
"""Nothing that we save is nested as deep."""
_PLAIN = (str, int, float, bool, type(None))


def state_from(data: bytes) -> dict[str, Any]:
    """What torch.save made ``data`` of, a dictionary, on the CPU; ValueError if it is anything else."""
    check_state(records_of(data))
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's message goes on with how to run it all the same.
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it asks for {found[1]}" if found else "or it is damaged"
        raise ValueError(f"it holds more than tensors and plain values: {what}") from error
    except Exception as error:  # wrong bytes fail anywhere inside torch, in any way
        raise ValueError(f"torch cannot read it ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not a dictionary")
    _check_plain(state, 0)
    return state


def _check_plain(value: Any, depth: int) -> None:
    """Raises ValueError for what is neither plain nor a tensor, and for tensors larger than their memory."""
    if depth > _DEEPEST:
        raise ValueError(f"it is nested deeper than {_DEEPEST}")
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            if not isinstance(key, (str, int)):
                raise ValueError(f"it has a key of type {type(key).__name__}")
            _check_plain(item, depth + 1)
    elif type(value) in (list, tuple, torch.Size):
        for item in value:
            _check_plain(item, depth + 1)
    elif isinstance(value, Tensor):
        _check_tensor(value)
    elif type(value) not in _PLAIN:
        raise ValueError(f"it holds a {type(value).__name__}")


def _check_tensor(tensor: Tensor) -> None:
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
        kind = f"{type(tensor).__name__}, {tensor.layout}, on {tensor.device}"
        raise ValueError(f"it holds a tensor that is not a plain one ({kind})")
    size, there = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if size > there:  # by strides of zero: a terabyte in a few bytes
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} would take {size:,} bytes, it has {there:,}"
        )
