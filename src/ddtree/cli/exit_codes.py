"""What a command ends with besides 0."""

TEXTS_DIFFER = 1  # of the demo, replay and compare
DOES_NOT_FIT = 1  # of the doctor: something stops DDTREE
ARMS_FAILED = 1  # of bench: an engine did not start or died
USER_ERROR = 2
UNFINISHED = 75  # of training: --max-seconds stopped it, run it again (EX_TEMPFAIL of sysexits)
INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C
BROKEN_PIPE = 141  # the shell's code for a program whose reader went away
TERMINATED = 143  # the shell's code for a program ended by SIGTERM
