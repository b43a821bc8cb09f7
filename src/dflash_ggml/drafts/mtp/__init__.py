"""The head for multi-token prediction that a target's file may hold, as a draft."""
