"""DSpark: a DFlash draft whose logits depend on the previous token through a low-rank Markov head."""
