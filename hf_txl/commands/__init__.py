"""The commands of `hf-txl`, one file each. Torch is imported when one runs, so that `--help` need not wait."""
