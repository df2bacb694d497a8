"""The command line: from words to checked jobs, and from jobs to processes."""
