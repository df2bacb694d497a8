"""The command line: turn arguments into checked jobs, and jobs into processes."""
