"""From a model to a checkpoint in 4 bits."""
