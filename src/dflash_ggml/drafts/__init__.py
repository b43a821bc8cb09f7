"""What proposes tokens: one file or folder per kind of draft."""
