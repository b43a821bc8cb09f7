"""Drafting with the multi-token prediction head (MTP) in a target's file."""
