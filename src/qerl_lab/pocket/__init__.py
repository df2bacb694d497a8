"""The embedded policy of 0.9M parameters: its files, and the recipe that made them."""
