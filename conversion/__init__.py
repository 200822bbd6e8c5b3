"""Converters: every published Transformer-XL checkpoint and vocabulary into folders that transformers loads."""
