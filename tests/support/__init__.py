"""Shared by tests of several rooms: models, runners, oracles, and programs to run by hand.

Three are programs: `python -m tests.support.bad_inputs` (every bad input and its message),
`python -m tests.support.interrupts 10000` (exceptions at random lines of the engine) and
`python -m tests.support.counterexample` (the shortest way to make the real code break).
"""
