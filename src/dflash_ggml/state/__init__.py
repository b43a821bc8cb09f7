"""What a sequence leaves in memory: caches, recurrent state, masks, snapshots, and the plan for it."""
