"""Requests in, events out: what the class, the server and the commands share."""
