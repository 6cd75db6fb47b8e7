"""The runner on a CPU: ``runner`` and ``pack`` (a step), ``edits`` (rows whose logits are edited),
``drafting`` (a second model), ``platform`` and ``threads`` (startup).
"""
