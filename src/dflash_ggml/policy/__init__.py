"""What to draft and how wide to verify: one policy for one or many sequences."""
