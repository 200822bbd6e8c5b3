"""The template of the model card that `hf-txl convert` writes."""
