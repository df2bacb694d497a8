"""Grade the answer in a completion. docs/answers.md says which answers count as equal.

completion.py   finds the text of the final answer, outside of the thinking
numbers.py      compares two plain numbers exactly
surface.py      normalizes the text's spelling
reading.py      parses the form of an answer (forms.py: quantity, list, point, interval, matrix, equation, words) with
    units.py        splits a number from its unit, its money sign and the words behind it
    expression.py   parses mathematics into a tree
equality.py     compares two forms, with
    value.py        the value of an expression: exact, or to 100 digits at several points
    intervals.py    sets of real numbers
judge.py        returns the verdict: right, wrong, unreadable, or undecided; for the last it asks
library.py      math-verify, in a worker process
"""

from qerl_lab.tasks.answers.numbers import number

__all__ = ["number"]
