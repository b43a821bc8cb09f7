"""Decoding of a sequence without a device: tree, candidates, acceptance, sampling. numpy, and inner loops in C."""
