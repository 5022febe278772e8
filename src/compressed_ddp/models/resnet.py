"""ResNet-18 and ResNet-50. He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2015.

Parameters and buffers have torchvision's names and shapes, so its weights load by ``load_state_dict``
(with the ImageNet stem). As there by default, the last norm of a block starts at one, not at zero:
every parameter has a gradient from the first step on.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

IMAGENET_HEIGHT = 64
"""Images of at least this height get the ImageNet stem, lower ones the CIFAR stem."""

WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the first has the stride."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return F.relu(y, inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut.

    The 3x3 has the stride. In the paper it is on the first 1x1, which throws three pixels of four
    away unseen; published weights are for the stride here ("ResNet v1.5").
    """

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = _shortcut(channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """``depths[i]`` blocks of width 64 * 2**i for i = 0 to 3, then the mean over pixels and a linear layer.

    ``shape`` is (channels, height, width). The stem is a 7x7 convolution with stride 2 and a
    max-pool with stride 2 where the height is 64 or more, and else, as for CIFAR, a 3x3
    convolution with stride 1 and no pool.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
    ) -> None:
        super().__init__()
        channels, height, _ = shape
        self.large = height >= IMAGENET_HEIGHT
        self.conv1 = _conv(channels, 64, 7, 2) if self.large else _conv(channels, 64, 3)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = [64, *(width * block.expansion for width in WIDTHS)]
        self.layer1 = _stage(block, inputs[0], WIDTHS[0], depths[0], 1)
        self.layer2 = _stage(block, inputs[1], WIDTHS[1], depths[1], 2)
        self.layer3 = _stage(block, inputs[2], WIDTHS[2], depths[2], 2)
        self.layer4 = _stage(block, inputs[3], WIDTHS[3], depths[3], 2)
        self.fc = nn.Linear(inputs[4], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of ``images`` (batch, channels, height, width)."""
        x = F.relu(self.bn1(self.conv1(images)), inplace=True)
        if self.large:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet18(shape: tuple[int, ...], classes: int) -> ResNet:
    """11,689,512 parameters with the ImageNet stem and 1,000 classes."""
    return ResNet(shape, classes, block=BasicBlock, depths=(2, 2, 2, 2))


def resnet50(shape: tuple[int, ...], classes: int) -> ResNet:
    """25,557,032 parameters with the ImageNet stem and 1,000 classes."""
    return ResNet(shape, classes, block=Bottleneck, depths=(3, 4, 6, 3))


def _conv(channels: int, width: int, size: int, stride: int = 1) -> nn.Conv2d:
    # No bias: the batch norm after it has one.
    return nn.Conv2d(channels, width, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(channels: int, width: int, stride: int) -> nn.Sequential | None:
    """What brings a block's input to the shape of its output; None where it has it already."""
    if stride == 1 and channels == width:
        return None
    return nn.Sequential(_conv(channels, width, 1, stride), nn.BatchNorm2d(width))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], channels: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    """``depth`` blocks, of which the first changes the number of channels and has the stride."""
    first = block(channels, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(depth - 1)))
