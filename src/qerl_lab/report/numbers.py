"""How the tables and figures of a report spell numbers. Never with an exponent: a reader compares 9,800 with 10,600."""


def number(value: float) -> str:
    """Three digits after the point below 10, four figures below 1,000, from there on a whole number with commas."""
    if abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def tick(value: float, _: object = None) -> str:
    """A number of an axis, which says no more digits than it has."""
    return f"{value:g}" if abs(value) < 1000 else f"{value:,.0f}"
