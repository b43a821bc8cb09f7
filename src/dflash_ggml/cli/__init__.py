"""Commands for the terminal: dflash-run, dflash-chat, dflash-doctor, dflash-convert, their arguments and reports."""
