"""From a completion to a verdict on its answer. docs/answers.md says in words what is right.

completion.py   the text of the final answer, outside of the thinking
numbers.py      a plain number is compared exactly, and that is all
surface.py      one spelling for what typesets alike
forms.py        quantity, list, point, interval, set, matrix, equation, words: reads by
    units.py        what stands around a number
    expression.py   mathematics as a tree
equality.py     compares two forms, expressions by
    value.py        their values: exact, or to 100 digits at several points
judge.py        these in order: right, wrong, unreadable, or a case for
library.py      math-verify, in a worker process
"""

from qerl_lab.tasks.answers.numbers import number

__all__ = ["number"]
