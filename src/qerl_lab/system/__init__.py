"""Files, signals, exit codes, child processes, and the terminal."""
