"""Targets: the contract, one file per architecture with its parameters and graph, and what they share."""
