"""Drafts: the contract, and one file or folder per kind."""
