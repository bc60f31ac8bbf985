"""Dumps into tables, statistics and figures; never needs torch."""

if __name__ != "deltad.analysis":
    raise ImportError(
        f"this folder is the package `deltad.analysis`, imported here as {__name__!r}: "
        "run `pip install -e .` in the repository and `import deltad.analysis`"
    )
