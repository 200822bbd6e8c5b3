"""Reads every published Transformer-XL checkpoint and vocabulary, and writes folders that transformers loads."""
