"""`dflash-bench`: suites that measure speed and acceptance of a pair on this machine, and their reports."""
