"""Read and compare final answers, in the steps of `grading.judge`. docs/answers.md says which answers count as equal.

completion.py   finds the text of the final answer, outside of the thinking
surface.py      normalizes the text's spelling
reading.py      parses the form of an answer (forms.py: quantity, list, point, interval, matrix, equation, words) with
    quantity.py     splits a number from its unit, its money sign and the words behind it
    expression.py   parses mathematics into a tree, from tokens.py
equality.py     compares two forms, with
    value.py        the value of an expression: exact, or to 100 digits at several points
    intervals.py    sets of real numbers
library.py      math-verify, in a worker process
"""
