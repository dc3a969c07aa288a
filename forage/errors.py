"""The one error that is the user's to mend; the command line prints it and exits with 2."""


class UserError(ValueError):
    """What is wrong, which value, and what to do; shown without a traceback."""
