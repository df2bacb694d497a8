"""Models made of packed weights: files, Linears, LoRA, and the policy that a run trains."""
