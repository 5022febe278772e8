"""Train a small network on real handwritten digits, compressed: torchrun --nproc-per-node 2 quickstart.py"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compressed_ddp import CompressionConfig, attach

method = sys.argv[1] if len(sys.argv) > 1 else "topk"
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
order = torch.randperm(len(labels))
images, labels = images[order].float().div(16), labels[order]
train, test = slice(rank, 1500, world), slice(1500, None)

net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model = DistributedDataParallel(net)
sync = attach(model, CompressionConfig(compressor=method, ratio=0.01))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(20):
    for x, y in zip(images[train].split(50), labels[train].split(50), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

if rank == 0:
    accuracy = (net(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"test accuracy {accuracy:.1%}\n{sync.stats}\n")
sync.close()
dist.destroy_process_group()
