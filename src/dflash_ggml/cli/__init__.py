"""Commands for the terminal: dflash-run, dflash-chat, dflash-doctor, their arguments and reports."""
