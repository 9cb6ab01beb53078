"""Texts to tokens: units of a file, pairs, chats, packed rows."""
