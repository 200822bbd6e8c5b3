"""Slow references: the model and its attention kinds by loops over queries and keys, in float64, meant to be read.

They import nothing of the package. Tests compare the model with them, and `hf-txl convert --verify` compares a
converted checkpoint: `transformer_xl` holds the model of the paper, `kinds` the other position encodings.
"""
