"""Pydantic models of request bodies: names and types of their fields.

An unknown field is refused by name. ``fields`` has the fields that endpoints share, ``endpoints``
the bodies and their names in errors, ``shapes`` the forms of values. ``SamplingParams`` checks the
limits of sampling parameters.
"""
