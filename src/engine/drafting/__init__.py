"""Draft tokens: ``config`` (the engine argument), ``costs`` (durations of steps), ``mode`` (whether
a step has draft tokens, and how many), ``drafters`` with ``token_index`` (where they come from).
"""
