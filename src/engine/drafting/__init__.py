"""Draft tokens: ``config`` (the engine argument), ``costs`` (durations of steps), ``mode`` (whether
a step has draft tokens, and how many), ``drafters`` (where they come from).
"""
