"""One text and the next tokens of it: tree, acceptance, sampling, the controller. numpy only."""
