"""Attach the probe and the masks to TRL's trainers."""
