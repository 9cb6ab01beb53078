"""From a launcher to the first line of main, and from its last line to an exit code.

1. launcher       reads the YAML of accelerate; programs/launch.py starts the processes
2. launched       what a launcher has set in the environment of this one
3. shutdown.run   calls prepare(), then main(); a signal ends the process until the loop begins
4. rendezvous     who prepares, who is ready, who has failed; then the process group
5. device         the arguments of Accelerator, and whether it is what the YAML says; what cannot be
                  combined ends the run before anything is read or built
"""
