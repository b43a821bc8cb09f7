"""The step loop, the device passes under it, and loading."""
