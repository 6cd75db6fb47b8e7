"""The bodies of requests, as pydantic models: what may be asked for, and of which type.

A field that is not here is refused by its name. ``fields`` has what the endpoints share,
``completions`` and ``chat`` the rest, ``shapes`` the forms of values. Limits of
sampling parameters are ``SamplingParams``' own; ``names`` says what they are called here.
"""
