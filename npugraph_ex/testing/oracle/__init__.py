"""Is a program compiled rightly? Runs it in eager mode, optimised, and replayed, and judges what differs."""
