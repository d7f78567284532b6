"""Measures what the tests find: `python -m tests.mutants ROOM`, or `faults`.

A mutant is the package with one small mistake in it: a comparison turned round, a
call left out, a number one too high. It dies if a default test fails on it. Random
mutants of a room (`mutation.py`) are compared before and after tests are deleted: the
same ones have to die. `killed` has, by room, those that died in the suite of 8,194
default tests (7de0c959). The faults written by hand (`faults.py`) are mistakes that
would cost a user something; all of them have to die.

A run first executes the tests of the room under `coverage`, once, to learn which tests
reach which line and what each costs (`reach.py`). Each mutant then runs in a forked
process, with the tests that reach it, the cheapest first, until one fails.
"""
