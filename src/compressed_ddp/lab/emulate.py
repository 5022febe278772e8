"""Emulated compute: a model's gradients, one after the other, without the arithmetic of a model.

Many hosts on few cores cannot all run a real forward and backward pass; they can all sleep. An
emulated backward pass takes the time it is told to, and DDP sees what it sees in training: gradients
of the right shapes that become ready from the last layer to the first, bucket by bucket.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..models import MODELS, outline
from ..types import unknown_name

SIZES: dict[str, tuple[tuple[int, ...], int]] = {"resnet50": ((3, 224, 224), 1000)}
"""Data shape and classes of models whose usual size is not the one that networks are judged by."""

_SHIFT, _SHIFTS = 4096, 8
"""From step to step gradients move on by so many elements in the pool, and begin again after so many."""


def model_shapes(model: str) -> list[torch.Size]:
    """The shapes of a model's parameters, first layer first: ``resnet50`` has 25,557,032 elements."""
    if model not in MODELS:
        raise unknown_name("model", model, MODELS)
    shape, classes = SIZES.get(model, (MODELS[model].shape, MODELS[model].classes))
    return [parameter.shape for parameter in outline(model, shape=shape, classes=classes).parameters()]


def scaled_shapes(shapes: Sequence[torch.Size], elements: int) -> list[torch.Size]:
    """As many tensors of the same proportions with about ``elements`` elements in all.

    Weights become matrices whose sides both shrink with the square root; vectors shrink as the whole.
    """
    if elements < len(shapes):
        raise ValueError(f"{elements} elements are too few for {len(shapes)} tensors; at least one each")
    low, high = 0.0, 2.0 * elements / _total(shapes)
    for _ in range(40):  # rounding and the least size of 1 make the sum a little different from f
        middle = (low + high) / 2
        scaled = [_scaled(shape, middle) for shape in shapes]
        low, high = (middle, high) if _total(scaled) < elements else (low, middle)
    return scaled


def _scaled(shape: torch.Size, factor: float) -> torch.Size:
    if len(shape) < 2:
        return torch.Size([max(1, round(shape.numel() * factor))])
    side = math.sqrt(factor)
    return torch.Size([max(1, round(shape[0] * side)), max(1, round(shape[1:].numel() * side))])


def layers(shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Positions of the parameters of each layer, first layer first: a weight and the vectors after it."""
    found: list[list[int]] = []
    for at, shape in enumerate(shapes):
        if len(shape) >= 2 or not found:
            found.append([])
        found[-1].append(at)
    return found


def _total(shapes: Sequence[torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes)


Gradients = list[Tensor | None]


class GradientPool:
    """Random numbers made once; a step's gradients are a window of them, another one for each step."""

    def __init__(self, elements: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._numbers = torch.randn(elements + _SHIFT * _SHIFTS, generator=generator)
        self.elements = elements

    def window(self, step: int) -> Tensor:
        """The gradients of ``step``, flat, parameters in their order. A view: do not write to it."""
        return self._numbers.narrow(0, step % _SHIFTS * _SHIFT, self.elements)


class _Layer(torch.autograd.Function):
    """Passes a token on; its backward calls ``work`` and gives what that returns as the gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, work: Callable[[], Gradients], *parameters: Tensor) -> Tensor:
        ctx.work = work
        return token.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *ctx.work()


class EmulatedModel(nn.Module):
    """Parameters of the given shapes whose backward pass sleeps ``compute`` seconds in all.

    A layer is a weight (a tensor of two or more dimensions) with the vectors that follow it; all layers
    take the same share of the time, as those of convolutional networks about do. The pass keeps to a
    timetable: copying gradients is part of a layer's time, and a late layer does not delay the next.
    Wrap it with ``gradient_as_bucket_view=True``: then gradients are written straight into DDP's
    buckets, one copy a step, which is also what a real model pays.
    """

    def __init__(self, shapes: Sequence[torch.Size], pool: GradientPool, compute: float) -> None:
        super().__init__()
        if _total(shapes) != pool.elements:
            raise ValueError(f"a pool of {pool.elements} gradients does not fit {_total(shapes)} elements")
        # Never read and never written, so their memory is never touched.
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.compute, self.step = compute, 0
        self._pool, self._start = pool, 0.0
        self._layers = layers(shapes)

    def forward(self) -> Tensor:
        """A token whose ``backward`` is the emulated pass of the next step."""
        sizes = [parameter.numel() for parameter in self.weights]
        gradients = torch.split(self._pool.window(self.step), sizes)
        self.step += 1
        token = torch.zeros(())
        for number, layer in enumerate(self._layers):
            mine = [self.weights[at] for at in layer]
            views = [gradients[at].view(self.weights[at].shape) for at in layer]
            token = _Layer.apply(token, self._work(number, mine, views), *mine)  # type: ignore[no-untyped-call]
        return token

    def _work(
        self, number: int, parameters: list[nn.Parameter], gradients: list[Tensor]
    ) -> Callable[[], Gradients]:
        last = len(self._layers) - 1
        due = self.compute * (last + 1 - number) / (last + 1)

        def work() -> Gradients:
            if number == last:  # backward begins with the last layer
                self._start = time.perf_counter()
            views = [parameter.grad for parameter in parameters if parameter.grad is not None]
            fresh: Gradients = [None] * len(parameters)
            if len(views) < len(parameters):
                fresh = [gradient.clone() for gradient in gradients]
            else:
                # DDP left views of its buckets here. It takes "no gradient" for "as it is".
                torch._foreach_copy_(views, gradients)
            time.sleep(max(0.0, self._start + due - time.perf_counter()))
            return fresh

        return work
