"""Requests, scheduler, block manager, the step loop and the user's classes."""
