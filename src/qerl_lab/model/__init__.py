"""The policy that a run trains: model files, packed Linears, LoRA adapters, noisy norms."""
