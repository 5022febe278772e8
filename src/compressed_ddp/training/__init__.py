"""The training application: configuration, loop, checkpoints, launcher, command line."""
