#!/usr/bin/env python3
"""Trains a small convolutional network on synthetic images, on a real GPU.

The images are noise with a bar whose angle is the class, so there is something to learn and nothing to download. The same
arguments give the same losses on the same machine. Exit codes: 0 done, 1 failed, 2 out of device memory, 3 PyTorch or
a GPU is missing, 64 wrong arguments.
"""

import math

import common

CLASSES = 10
SIDE = 32


def main():
    args = common.parser("Train a small CNN on synthetic images.", batch=128, lr=1e-3).parse_args()
    torch = common.require_torch(args)
    from torch import nn
    from torch.nn import functional

    common.deterministic(torch, args.seed)

    class Bars(torch.utils.data.Dataset):
        """Image `at` is a function of the seed and `at`, whichever process makes it."""

        def __len__(self):
            return args.steps * args.batch

        def __getitem__(self, at):
            random = torch.Generator().manual_seed(args.seed * 1_000_003 + at)
            label = int(torch.randint(CLASSES, (), generator=random))
            angle = math.pi * label / CLASSES
            grid = torch.arange(SIDE, dtype=torch.float32) - (SIDE - 1) / 2
            distance = grid[:, None] * math.cos(angle) - grid[None, :] * math.sin(angle)
            bar = (distance.abs() < 3).float()
            return bar + 0.5 * torch.randn(3, SIDE, SIDE, generator=random), label

    def block(inputs, outputs):
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]

    model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(128 * 16, CLASSES))

    def loss_of(forward, batch):
        images, labels = batch
        return functional.cross_entropy(forward(images), labels)

    common.train(torch, args, "cnn", model, Bars(), loss_of)


if __name__ == "__main__":
    common.run(main)
