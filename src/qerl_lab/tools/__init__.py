"""Commands around the runs: warm up, export, search, show samples, queue, print a server's command."""
