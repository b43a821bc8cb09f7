"""DFlash2: dynamic convolutions around attention and FFN of a DFlash draft, and scores of neighbouring candidates."""
