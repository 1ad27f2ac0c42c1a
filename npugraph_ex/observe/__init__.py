"""What a person can see of a compilation: the logger, graph dumps, explanations, the environment.

`explain` turns the records of `npugraph_ex.report` into tables and JSON. `dump` writes the graph after each pass,
`compare` finds where two dumps of values differ. `environment` and `installing` say what is installed, and what to
install.
"""

NOTHING_COMPILED = "Nothing was compiled by this backend in this process; processes that it starts are not looked at."
"""What the commands say of a script that compiled nothing; torch may not even import then, so it stands here."""
