"""Exit codes of a command; `docs/reference/exit_codes.md` has the table for schedulers.

0 the run is done; 1 a rank failed; 2 the configuration is invalid; 128 + n ended at once by signal n.
"""

DONE = 0
FAILED = 1  # a rank died, or has lost another one
USER_ERROR = 2  # what the user must correct: the configuration, a checkpoint that cannot be used
DIVERGED = 3  # too many steps in a row without a finite gradient
REPLICAS_DIFFER = 4  # ranks that must hold equal numbers do not
STALLED = 5  # a rank made no progress within the time limit
NOT_SAVED = 74  # the last checkpoint could not be written (EX_IOERR)
INTERRUPTED = 75  # SIGTERM or SIGUSR1: saved, to be continued with resume=auto (EX_TEMPFAIL)
