"""The faults of the zoo, one file each; see docs/zoo.md."""
