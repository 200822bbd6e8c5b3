"""Cards of published checkpoints, and the template that `hf-txl convert` fills in."""
