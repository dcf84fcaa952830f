"""The command line: a file a command, each imported only when it is called.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 findings or a failure, 2 usage (a
missing pipeline file too), 130 forced.
"""
