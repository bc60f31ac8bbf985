"""The readout on a GPU: two Triton kernels, imported only where they run."""
