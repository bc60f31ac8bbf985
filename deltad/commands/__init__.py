"""The commands: each turns options into one call of a plain function and prints what it gives."""
