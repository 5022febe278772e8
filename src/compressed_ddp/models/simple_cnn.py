"""A small convolutional network: cheap enough for several workers on one CPU, good enough for MNIST."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

LARGEST_MAP = 8
"""Larger feature maps are averaged down to this many pixels a side, which is what 32x32 images give."""


class SimpleCNN(nn.Module):
    """Two 3x3 convolutions, each with ReLU and 2x2 max-pooling, then two linear layers.

    ``shape`` is (channels, height, width), at least 4x4 pixels. No dropout and no batch norm: a
    step depends on nothing but the weights and the batch, so runs can be compared bit by bit.
    206,922 parameters on 28x28 grey images of 10 classes.
    """

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 4:
            raise ValueError(
                f"simple_cnn halves the image twice and {height}x{width} leaves nothing; "
                "give images of at least 4x4 pixels"
            )
        self.map = (min(height // 4, LARGEST_MAP), min(width // 4, LARGEST_MAP))
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * self.map[0] * self.map[1], 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of ``images`` (batch, channels, height, width)."""
        # ReLU after pooling gives the same as before it, on a quarter of the elements.
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        if x.shape[-2:] != self.map:
            x = F.adaptive_avg_pool2d(x, self.map)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits
