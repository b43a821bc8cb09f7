"""State of sequences in memory: caches, recurrent state, masks, snapshots, and the memory plan."""
