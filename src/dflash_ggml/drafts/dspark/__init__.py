"""DSpark: a DFlash draft whose logits take in the token before, through a low-rank Markov head."""
