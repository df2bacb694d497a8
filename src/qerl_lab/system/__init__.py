"""What a process needs of its system: files, signals and exit codes, child processes, a terminal."""
