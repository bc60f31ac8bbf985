"""What the probe raises."""


class ProbeError(ValueError):
    """What the probe was given, or how it was used, cannot give a true row; says what to do."""


def first_line(error: BaseException) -> str:
    """First line of what an error says, or its kind where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
