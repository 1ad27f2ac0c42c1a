"""Random programs: typed steps over named values, around a planted pattern or of integers alone."""
