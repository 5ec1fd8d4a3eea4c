"""The command line. Heavy imports stay inside the commands, so that --help answers at once."""
