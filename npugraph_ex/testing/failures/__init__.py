"""What becomes of a failure: it is found, shrunk, blamed on a pass and a match, and written as a script."""
