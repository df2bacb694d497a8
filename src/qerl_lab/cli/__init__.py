"""The command line: turn words into checked jobs, and jobs into processes."""
