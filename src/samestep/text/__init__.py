"""Texts to tokens. A row of a language model passes these modules, in this order:

    formats      the kind of rows by their columns; what is stored of a text, a prompt, a chat
    chats        what messages must hold, and what a chat template makes of them
    tokenizing   tokenizers to load or to train; token ids and loss masks
    sequences    documents to sequences of context_length tokens, and their view

Of a stream, lanes reads shards when the model trains, and row_streams makes sequences of them, by
the same functions.
labelled, pairs and preferences do the same for the other tasks, whose rows are not packed.
"""
