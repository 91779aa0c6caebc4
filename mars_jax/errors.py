"""Errors that a user can fix."""


class UserError(Exception):
    """Wrong arguments, config or input. The message names the input, the value and the remedy; commands exit with 2."""
