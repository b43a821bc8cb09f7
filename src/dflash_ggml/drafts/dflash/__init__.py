"""DFlash block drafts: files of every dialect, parameters, graphs."""
