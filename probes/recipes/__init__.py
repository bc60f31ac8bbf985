"""Real updates on a small machine, ready to run."""
