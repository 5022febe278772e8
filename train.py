"""Train, compressed or not: the same as ``compressed-ddp train``, and for torchrun.

python train.py --model simple_cnn --dataset mnist --epochs 10 --compress --ratio 0.01
torchrun --nproc-per-node 4 train.py --model resnet50 --dataset cifar10 --epochs 100 --compress
"""

import sys

from compressed_ddp.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
