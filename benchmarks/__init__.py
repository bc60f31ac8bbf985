"""Every goal of speed, memory and accuracy, measured: `python -m benchmarks`."""
