"""Models of the tasks, and losses that are sums over items.

    pretrained, lora   weights of transformers, or new ones; adapters beside frozen weights
    next_token         the loss of a language model, in bounded memory
    classification, preferences   tables of scores; log-probabilities of answers

A label stands at its own token: here the second position predicts 7.

    >>> import torch
    >>> from samestep.models import next_token
    >>> next_token.counted({"labels": torch.tensor([[5, -100, 7]])})
    tensor([[False,  True, False]])
"""
