"""Tokenizer, chat templates, and the token cache."""
