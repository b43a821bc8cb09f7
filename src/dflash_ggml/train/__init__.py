"""Training a draft for a target that is there as a transformers checkpoint. Needs torch; nothing else in the package does."""
