"""What the probe raises."""


class ProbeError(ValueError):
    """What the probe was given, or how it was used, cannot give a true row; says what to do."""
