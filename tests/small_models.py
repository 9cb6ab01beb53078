"""Very small models of transformers, and tokenizers of whole words, to start from."""

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES["num_attention_heads"] = 2


def new_model(family, head="ForCausalLM", seed=0, **fields):
    """A model with new weights: of a family, such as Llama, and with a head, such as Model."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    return getattr(transformers, f"{family}{head}")(config)


def word_tokenizer(words, whole=False, **marks):
    """A tokenizer of these words, by their numbers, or in their order; `marks` as unk_token="?".
    `whole`: a text is one word."""
    words = words if isinstance(words, dict) else {word: i for i, word in enumerate(words)}
    own = tokenizers.Tokenizer(models.WordLevel(words, marks.get("unk_token", [*words][0])))
    if not whole:
        own.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, **marks)
