"""`python -m deltad.probes.verl`: whether the plugin is loaded in this environment, or why not."""

from __future__ import annotations

import sys

from .status import status

if __name__ == "__main__":
    report = status()
    sys.stdout.write(report.text())
    sys.exit(0 if report.loaded else 1)
