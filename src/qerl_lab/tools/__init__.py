"""Commands around runs: plan many of them over machines that are lent for minutes."""
