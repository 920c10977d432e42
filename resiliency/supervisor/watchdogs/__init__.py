"""Things that look whether a host and its devices are well. See :mod:`~resiliency.supervisor.watchdogs.base`."""
