"""The multi-token prediction head (MTP) in a target's file, as a draft."""
