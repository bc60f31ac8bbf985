"""Hooks on a real training step: every response token's divergence before and after it."""

if __name__ != "deltad.probes":
    raise ImportError(
        f"this folder is the package `deltad.probes`, imported here as {__name__!r}: "
        "run `pip install -e '.[probes]'` in the repository and `import deltad.probes`"
    )
