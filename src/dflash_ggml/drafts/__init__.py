"""What proposes tokens: the contract, and one file or folder per kind of draft."""
