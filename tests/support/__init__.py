"""Helpers that tests of several packages share: models, runners, reference results, and programs.

Three modules are programs to run by hand:

- `python -m tests.support.bad_inputs` prints the error message of every kind of bad input.
- `python -m tests.support.interrupts 10000` raises exceptions at random lines of the engine.
- `python -m tests.support.counterexample` prints the shortest sequence of actions that fails.
"""
