"""Dumps from scoring files that another framework wrote: `deltad import`."""
