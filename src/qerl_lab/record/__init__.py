"""The run directory: its files, written so that a kill or a full disk leaves each whole or absent."""
