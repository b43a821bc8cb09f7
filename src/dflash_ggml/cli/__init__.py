"""Commands for the terminal: dflash-run, dflash-chat, their arguments and reports."""
