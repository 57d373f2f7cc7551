"""What entry points share: Hydra in, one-line errors and exit codes out; registers the resolvers of `conf/`."""

from . import conf_files as conf_files
