"""The step, the device passes under it, and loading."""
