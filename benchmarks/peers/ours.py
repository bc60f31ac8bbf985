"""`deltad` on one core: `python -m benchmarks.peers.ours table RUN …`."""

from __future__ import annotations

import os


def main() -> None:
    """Run the command line."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from deltad.cli import main as command

    command()


if __name__ == "__main__":
    main()
