"""Pydantic models of request bodies: names and types of their fields.

An unknown field is refused by name. ``fields`` defines the fields that endpoints share,
``endpoints`` the bodies and their field names in errors, ``shapes`` the types of values.
``SamplingParams`` checks the limits of sampling parameters.
"""
