"""Prints the peak memory of the loss of 8,192 tokens with a vocabulary of 32,768, on a CPU.

    python tests/loss_memory.py 8192
    python tests/loss_memory.py 1024

The argument is `loss_chunk`; from 8192 on, all logits exist at once. One chunk a process: what is
measured is the largest memory that the process ever had.
"""

import resource
import sys

import torch

TOKENS, VOCABULARY, WIDTH = 8192, 32_768, 256


def peak():
    """The largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(chunk):
    from samestep.models import next_token

    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH).div_(16).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    before = peak()
    if chunk < TOKENS:
        loss = next_token.ChunkedLoss.apply(hidden, weight, labels, chunk, True)
    else:
        loss = next_token.cross_entropy(hidden @ weight.T, labels)
    (loss / TOKENS).backward()
    print(f"{peak() - before:.0f} MB, loss {loss.item() / TOKENS:.6f}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
