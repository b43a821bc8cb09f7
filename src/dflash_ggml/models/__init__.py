"""Hyper-parameters and graphs of the target and of the draft."""
