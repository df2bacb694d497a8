"""Configuration: every key with its default, unit and meaning, the rules across keys, what may be typed."""
