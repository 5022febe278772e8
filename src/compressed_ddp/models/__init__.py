"""Models by name, for the training program: a dictionary. Adding a model means adding a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..types import unknown_name
from .gpt import GPT
from .resnet import ResNet, resnet18, resnet50
from .simple_cnn import SimpleCNN


class ModelInfo(NamedTuple):
    """What a model is for, and how it is made of a dataset's shape and number of classes."""

    kind: str
    """image: the shape is (channels, height, width). text: (block,), and classes is the vocabulary."""
    about: str
    make: Callable[[tuple[int, ...], int], nn.Module]
    shape: tuple[int, ...]
    """The shape it is usually for: what ``table`` counts its parameters on."""
    classes: int


def _gpt(shape: tuple[int, ...], classes: int) -> GPT:
    return GPT(shape[0], classes)


MODELS: dict[str, ModelInfo] = {
    "simple_cnn": ModelInfo(
        "image", "two convolutions, two linear layers; cheap on a CPU", SimpleCNN, (1, 28, 28), 10
    ),
    "resnet18": ModelInfo("image", "ResNet-18; CIFAR stem below 64 pixels", resnet18, (3, 32, 32), 10),
    "resnet50": ModelInfo("image", "ResNet-50; CIFAR stem below 64 pixels", resnet50, (3, 32, 32), 10),
    "gpt": ModelInfo("text", "causal transformer over bytes; 4 layers of width 128", _gpt, (128,), 256),
}

DIMENSIONS = {"image": 3, "text": 1}
"""How long the shape of each kind of data is."""


def build(name: str, *, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model ``name`` for data of ``shape``, with weights drawn from torch's global generator.

    Raises ValueError for an unknown name, a model that is not for such data, or sizes below 1.
    """
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    info = MODELS[name]
    if min(shape, default=0) < 1 or len(shape) not in DIMENSIONS.values():
        raise ValueError(
            f"shape must be (channels, height, width) for images or (block,) for text, got {shape}"
        )
    if classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes}; for text it is the vocabulary (256)")
    if len(shape) != DIMENSIONS[info.kind]:
        kind = next(kind for kind, length in DIMENSIONS.items() if length == len(shape))
        fitting = ", ".join(other for other, row in MODELS.items() if row.kind == kind)
        raise ValueError(
            f"model {name!r} is for {info.kind} data, and shape {shape} is {kind} data; "
            f"models that fit: {fitting}"
        )
    return info.make(shape, classes)


class _Undrawn(TorchFunctionMode):
    """Leaves out normal initialisation, for which torch would import its compiler on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.normal_, nn.init.normal_, nn.init.kaiming_normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def outline(name: str, *, shape: tuple[int, ...], classes: int) -> nn.Module:
    """``build`` on the meta device: shapes alone, no memory for weights, no random number drawn."""
    with torch.device("meta"), _Undrawn():
        return build(name, shape=shape, classes=classes)


def count_parameters(model: nn.Module) -> int:
    """How many numbers training changes; a parameter used twice counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def table() -> str:
    """One line for each model, for printing; parameters are counted on the shape it is usually for."""
    rows = [("model", "parameters", "on", "kind", "about")]
    for name, info in MODELS.items():
        count = count_parameters(outline(name, shape=info.shape, classes=info.classes))
        rows.append((name, f"{count:,}", "x".join(map(str, info.shape)), info.kind, info.about))
    name_width, count_width, on_width, kind_width, _ = (
        max(map(len, column)) for column in zip(*rows, strict=True)
    )
    return "\n".join(
        f"{name:<{name_width}}  {count:>{count_width}}  {on:<{on_width}}  {kind:<{kind_width}}  {about}"
        for name, count, on, kind, about in rows
    )


__all__ = [
    "GPT",
    "MODELS",
    "ModelInfo",
    "ResNet",
    "SimpleCNN",
    "build",
    "count_parameters",
    "outline",
    "resnet18",
    "resnet50",
    "table",
]
