"""Texts to tokens: formats of rows, chats, pairs, labels, packed sequences."""
