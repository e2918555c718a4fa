#!/usr/bin/env python3
"""Trains a small GPT on synthetic text, on a real GPU.

The text strings together phrases of a fixed book in random order, so there is something to learn and nothing to
download. The same arguments give the same losses on the same machine. Exit codes: 0 done, 1 failed, 2 out of device
memory, 3 PyTorch or a GPU is missing, 64 wrong arguments.
"""

import common

VOCABULARY = 256
PHRASES = 64
PHRASE = 12


def main():
    parser = common.parser("Train a small GPT on synthetic text.", batch=16, lr=3e-4)
    parser.add_argument("--layers", type=common.positive, default=6, help="transformer blocks (default %(default)s)")
    parser.add_argument("--width", type=common.positive, default=384, help="size of an embedding, a multiple of --heads (default %(default)s)")
    parser.add_argument("--heads", type=common.positive, default=6, help="attention heads (default %(default)s)")
    parser.add_argument("--context", type=common.positive, default=256, help="tokens per example (default %(default)s)")
    args = parser.parse_args()
    if args.width % args.heads != 0:
        parser.error(f"--width {args.width} is no multiple of --heads {args.heads}")
    torch = common.require_torch(args)
    from torch import nn
    from torch.nn import functional

    common.deterministic(torch, args.seed)

    book = torch.randint(VOCABULARY, (PHRASES, PHRASE), generator=torch.Generator().manual_seed(args.seed))

    class Phrases(torch.utils.data.Dataset):
        """Example `at` is a function of the seed and `at`, whichever process makes it."""

        def __len__(self):
            return args.steps * args.batch

        def __getitem__(self, at):
            random = torch.Generator().manual_seed(args.seed * 1_000_003 + at)
            count = args.context // PHRASE + 2
            text = book[torch.randint(PHRASES, (count,), generator=random)].flatten()
            start = int(torch.randint(PHRASE, (), generator=random))
            text = text[start : start + args.context + 1]
            return text[:-1], text[1:]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before_attention = nn.LayerNorm(args.width)
            self.before_mlp = nn.LayerNorm(args.width)
            self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
            self.out = nn.Linear(args.width, args.width, bias=False)
            self.mlp = nn.Sequential(
                nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
            )

        def forward(self, x):
            batch, tokens, width = x.shape
            parts = self.qkv(self.before_attention(x)).split(width, dim=2)
            q, k, v = (part.view(batch, tokens, args.heads, -1).transpose(1, 2) for part in parts)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
            return x + self.mlp(self.before_mlp(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, args.width)
            self.places = nn.Parameter(0.02 * torch.randn(args.context, args.width))
            self.blocks = nn.Sequential(*(Block() for _ in range(args.layers)))
            self.norm = nn.LayerNorm(args.width)
            self.head = nn.Linear(args.width, VOCABULARY, bias=False)

        def forward(self, text):
            x = self.tokens(text) + self.places[: text.shape[1]]
            return self.head(self.norm(self.blocks(x)))

    def loss_of(forward, batch):
        text, following = batch
        return functional.cross_entropy(forward(text).flatten(0, 1), following.flatten())

    # The fused attention kernels sum gradients in no fixed order; the plain one does.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        common.train(torch, args, "gpt_small", Gpt(), Phrases(), loss_of)


if __name__ == "__main__":
    common.run(main)
