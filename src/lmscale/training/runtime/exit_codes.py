"""How a training job ends, in the number its process returns; the README has the table for schedulers.

0 the run is done; 1 a rank failed; 2 the configuration cannot work; 128 + n ended at once by signal n.
"""

DONE = 0
USER_ERROR = 2  # a configuration that cannot work, or a checkpoint that cannot be used
DIVERGED = 3  # too many steps in a row without a finite gradient
REPLICAS_DIFFER = 4  # what must be equal on several ranks is not
STALLED = 5  # a rank made no progress within the time limit
NOT_SAVED = 74  # the last checkpoint could not be written (EX_IOERR)
INTERRUPTED = 75  # SIGTERM or SIGUSR1: saved, to be continued with resume=auto (EX_TEMPFAIL)
