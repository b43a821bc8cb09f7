"""Command-line programs: dflash-run, dflash-chat, dflash-doctor, dflash-convert, dflash-train, their options and reports."""
