"""Format numbers for tables and figures, never with an exponent, so that 9,800 and 10,600 compare at sight."""


def number(value: float) -> str:
    """Format with three decimals below 10, four digits below 1,000, else as a whole number with commas."""
    if abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def tick(value: float, _: object = None) -> str:
    """Format a number on an axis without trailing zeros."""
    return f"{value:g}" if abs(value) < 1000 else f"{value:,.0f}"
