"""A small RL training with a chosen mask: `deltad train`."""
