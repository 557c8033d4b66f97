"""The command as a program, for a process in which a release has been imported."""

from kvproof.__main__ import main

main()
