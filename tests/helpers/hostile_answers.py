"""The golds of tests/data, and hostile answers from a seed."""

import random
from pathlib import Path


def lines(name: str) -> list[str]:
    """Return the lines of a file of tests/data that are neither empty nor comments."""
    text = (Path(__file__).parents[1] / "data" / name).read_text(encoding="utf-8")
    return [line for line in text.split("\n") if line and not line.startswith("# ")]


GOLDS = lines("golds.txt")
PIECES = r"""
23 999999999 10^{9} 0. E9 E99999 ! !! pi \frac \frac{1}{ \sqrt \sqrt[3]{ \pm \text{ \{ \} \left \right \sin \log_ \binom
\infty \cup \in \le \begin{pmatrix} \\ \end{pmatrix} \overline \boxed{ \int \int_0^1 \sum_{k=1}^{n} \lim_{x\to0} dx
\circ and or million cm base am \dollar \row \% ^{10^9} ^{9^{9^9}} ² ٣ √ ½ ° × <answer> <think> </think>
"""  # noqa: RUF001
REPEATED = ["(", "{", r"\frac{", r"\sqrt{", "[", "|", "2^{", "-", r"\sin", "!", "1,", "x_", "9", "x+", "1 ", "\\", "$"]
LIBRARYS = [
    r"\sum_{k=1}^{A} k^B", r"\int_0^A x^B dx", r"\lim_{x\to A} x^B", r"\prod_{k=1}^{A} k!",
    r"\sum_{k=1}^{A} \frac{1}{k^B}", r"\int_0^\infty e^{-x^A} x^B dx", r"\sum_{a=1}^A \sum_{b=1}^A a^b",
    r"\lim_{n\to\infty} (1+A/n)^{Bn}",
]  # fmt: skip


def hostile(rng: random.Random) -> str:
    """Return random characters, broken LaTeX, nested brackets, huge exponents or long sums; rarely a megabyte."""
    kind = rng.randrange(1000)
    if kind < 200:
        return "".join(map(chr, rng.choices(range(1, 0x3000), k=rng.randrange(60))))
    if kind < 300:
        return rng.choice(REPEATED) * rng.randrange(500)
    if kind < 302:
        return rng.choice(REPEATED) * 300_000
    if kind < 304:
        sizes = [rng.choice(["1", "9", "99", "10^9", "n", r"\infty"]) for _ in "AB"]
        return rng.choice(LIBRARYS).replace("A", sizes[0]).replace("B", sizes[1])
    if kind < 400:
        gold = rng.choice(GOLDS)
        cut = rng.randrange(len(gold))
        return gold[:cut] + rng.choice(PIECES.split()) + gold[cut:]
    pieces = [*"1.,-+*/^_!()[]{}|=<>%$&~': xei\\", *PIECES.split(), "\ud800", "\x00", "\u2028", " and ", " or ", " am"]
    return "".join(rng.choices(pieces, k=rng.randrange(30)))
