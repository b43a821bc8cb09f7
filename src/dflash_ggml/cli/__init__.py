"""Commands for the terminal: dflash-run, dflash-chat, dflash-doctor, dflash-convert, dflash-train, their options and reports."""
