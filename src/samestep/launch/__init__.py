"""From a launcher to the first line of main: devices, rendezvous, signals, exit codes."""
