"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """Bad input: the message is one sentence that names the file or option and what to do.

    The command line prints it without a traceback and exits with 2.
    """
