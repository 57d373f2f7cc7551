"""Look up once what runs record of their process and machine: a quarter of the processor time of a tiny run.

Package versions, the commit and the standard library do not change while the tests run. Processes that are forked from
the server (see warm.py) find them there.
"""

import functools

from lmscale import results
from lmscale.data import embedded, sources

results._version, results._commit = functools.cache(results._version), functools.cache(results._commit)
embedded.embedded_fingerprint = sources.embedded_fingerprint = functools.cache(embedded.embedded_fingerprint)

results.collect_environment()
embedded.embedded_fingerprint()
